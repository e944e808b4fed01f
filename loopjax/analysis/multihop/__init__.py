"""Analyses of the states between loops of models of multi-hop questions.

`loopjax analysis RUN` applies to a run the analyses that
DiscoLoop (arXiv 2607.00341, sections 3.2 and 5.1) applies to the vanilla loop
(accuracy after every loop, logit lens, cosines, intervention), and causal
patching.

Loops count from 1 and denote the state after them; positions count from 0. Only
`instrumented` runs the model; `questions` prepares the questions. Every number
is a row of analysis.jsonl; tables and figures are made from these rows.
"""
