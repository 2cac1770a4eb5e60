"""The stages between the topics: pure "record in, events out", no device."""
