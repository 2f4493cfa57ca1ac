"""Other packages' weights, files and models: one module for each package.

Nothing here is imported before it is asked for (`import nf4tensor.integrations.bitsandbytes`), but
for `bitsandbytes_files.py`, with which `checkpoint` reads that package's folders like ours. No
module needs the package it is named after to read or write that package's bytes; those of
Transformers, PEFT and Accelerate have no bytes of their own, and need them. Called by users and the
command line.
"""
