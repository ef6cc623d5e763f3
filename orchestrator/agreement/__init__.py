"""Does the recorder say what CUDA says? Every subtest and every seeded fault on both, and a table of the verdicts.

``python -m orchestrator.agreement`` (``nox -s agreement``) runs the matrix twice on a host with a GPU: on the recorder
(``ATTNMATRIX_DEVICE=cpu``) and on CUDA graphs. Given the folders of two runs, it only compares them.
"""
