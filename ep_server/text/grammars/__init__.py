"""Structured output: what a grammar allows next, as a mask over the vocabulary.

The frontend checks a grammar in a process of its own (compiler) and turns it into a program, the notation of
llguidance. Ranks compile the program and follow it token by token (masks). The choice of the library is
measured in docs/design-notes/2026-11-structured-output.md.
"""
