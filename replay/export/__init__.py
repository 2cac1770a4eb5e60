"""A run as tables: what the log says, joined on stable ids, for pandas, polars, DuckDB and the like."""
