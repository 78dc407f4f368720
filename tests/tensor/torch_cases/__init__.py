"""Cases that PyTorch and tensorplay must answer alike.

Each module here is a subject; each public function of it takes the library (``torch`` or
``tensorplay``) and returns what is compared. ``record_torch.py`` records what PyTorch returns.
"""
