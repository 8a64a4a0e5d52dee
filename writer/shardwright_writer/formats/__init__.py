"""File formats as pure functions: plan in, bytes and places out."""
