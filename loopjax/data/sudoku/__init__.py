"""Sudoku: boards, solver, symmetries, generator, puzzle bank and files."""
