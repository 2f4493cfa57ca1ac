"""Other packages' weights, files and models: one module for each package.

Nothing here is imported before it is asked for (`import nf4tensor.integrations.bitsandbytes`), and
no module needs the package it is named after to read or write that package's bytes. Called by users
and the command line.
"""
