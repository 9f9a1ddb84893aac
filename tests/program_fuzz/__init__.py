"""Random valid training programs, in one process and on ranks: `make program-fuzz`.

The idea of models that are generated and valid by construction is that of NNSmith (Liu et al.,
ASPLOS 2023), and that of comparing trainings by their variables that of Muffin (Gu et al., ICSE
2022).
"""
