"""The functions behind ``nn.functional``, one family a file."""
