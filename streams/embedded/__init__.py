"""The embedded log: segment files in a folder, shared by the processes of one machine (local disk only)."""
