// What a thread block and a warp work on, and in which order; the picture is at the head of w3_decode.cu.
#pragma once
#include "w3_decode_params.cuh"

// Runs of units (row block, step) of this thread block, from the last row block to the first.
struct Run {
  int first, last;  // units [first, last)
};

// The first `longer_runs` blocks have one unit more than the others.
W3_DEVICE Run run_of(int block, const Params& p) {
  const int first = block * p.run_units + min(block, p.longer_runs);
  return {first, first + p.run_units + (block < p.longer_runs ? 1 : 0)};
}

W3_DEVICE int block_of_unit(int unit, const Params& p) {
  const int in_longer = p.longer_runs * (p.run_units + 1);
  return unit < in_longer ? unit / (p.run_units + 1) : p.longer_runs + (unit - in_longer) / p.run_units;
}

// a / b without a division, for (a + 1) * b < 2^32; `reciprocal` is (2^32 - 1) / b.
W3_DEVICE int quotient(int a, u32 reciprocal) {
  return static_cast<int>(__umulhi(static_cast<u32>(a) + 1, reciprocal));
}

// The walk over a run, row block by row block, the last one first; begin_of and end_of are the steps of it in a row block. In a cluster
// every block walks over the cluster's row blocks, each with its own part of the steps.
struct Walk {
  Run run;
  int first_block, last_block;  // row blocks
  int stride;                   // from one to the next
  int steps;

  W3_DEVICE Walk(const Params& p, int block) : steps(p.steps) {
    if constexpr (kCluster > 1) {
      const int rank = block % kCluster;
      run = {rank * steps / kCluster, (rank + 1) * steps / kCluster};
      first_block = block / kCluster;
      stride = p.clusters;
      last_block = first_block + (p.row_blocks - 1 - first_block) / stride * stride;
    } else {
      run = run_of(block, p);
      first_block = quotient(run.first, p.step_reciprocal);
      last_block = quotient(run.last - 1, p.step_reciprocal);
      stride = 1;
    }
  }

  W3_DEVICE int begin_of(int row_block) const { return kCluster > 1 ? run.first : max(run.first - row_block * steps, 0); }
  W3_DEVICE int end_of(int row_block) const { return kCluster > 1 ? run.last : min(run.last - row_block * steps, steps); }
};
