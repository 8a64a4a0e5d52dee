"""Reading checkpoints back, for `verify`: files in bounded memory, and what each must hold."""
