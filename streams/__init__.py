"""The log: events, codec, topics, the EventLog interface and its implementations. No torch, no device."""
