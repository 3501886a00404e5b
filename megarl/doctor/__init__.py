"""`megarl doctor` reports what this machine and installation have, and whether the parts work. `facts`
says what is there, `probe` tries it in processes of its own, `report` puts both on one screen."""
