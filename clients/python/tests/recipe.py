"""Runs a recipe of docs/guides/python-trainers.md, for test_recipes.py.

It kills the recipe's process with SIGKILL after a number of printed lines. 0 means never.
"""

import builtins
import io
import os
import runpy
import signal
import sys

script, lines = sys.argv[1], int(sys.argv[2])
sys.argv = [script]
printed = 0
original = builtins.print


def count(*words, **options):
    global printed
    line = io.StringIO()
    original(*words, file=line)
    os.write(1, line.getvalue().encode())  # one write, because several processes write
    printed += line.getvalue().startswith("rank ")
    if printed == lines:
        os.kill(os.getpid(), signal.SIGKILL)


builtins.print = count
runpy.run_path(script, run_name="__main__")
