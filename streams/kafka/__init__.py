"""The log on Apache Kafka (`kafka://host:port`). Import `streams.open.open_log`, not this."""
