"""The wire contract: writer.proto, its generated code, and what a .proto cannot say.

Both sides import from here; nothing here imports either side, torch, or (at import time)
grpc or the generated code, because the supervisor uses `control` with the standard library alone.
"""
