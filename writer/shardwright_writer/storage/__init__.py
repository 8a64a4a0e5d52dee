"""Where bytes go: one small interface over a folder, and its POSIX implementation."""
