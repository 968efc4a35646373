from helpers import oracle

NAMES = ("grouped", "grouped_streaming", "grouped_int4", "local_sgd", "outer_int4", "ssgd")
oracle.CASES[:] = [c for c in oracle.CASES if c.strategy in NAMES and c.world_size in (2, 4, 6)]
oracle.GRIDS[:] = [(c, r) for c, r in oracle.GRIDS if c in oracle.CASES]
if __name__ == "__main__":
    oracle.main()
