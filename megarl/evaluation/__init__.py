"""`megarl eval`: its arguments (arguments.py), the job on the ranks (job.py) and the result (report.py)."""
