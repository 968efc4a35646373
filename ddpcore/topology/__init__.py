"""Who averages with whom at a step, as pure data: no tensors, no communication, no state.

A topology answers one question, `round(step, rank, num_learners)`: whose weights does this learner read, and how much
does each count? Seen together, the rounds of a step are the mixing matrix W of decentralized SGD (Lian et al. 2017,
Algorithm 1), with W[j, k] the weight that learner j gives to learner k. W is doubly stochastic: rows sum to one, so a
learner holds an average; columns sum to one, so averaging never moves the mean over learners. On a directed graph only
the columns do: that is for push-sum, and ordinary gossip refuses it.

What a topology costs is linear in its edges. A matrix [n, n] is formed only by `matrix()`, and for the eigenvalues of a
topology in which learners do not do the same.
"""
