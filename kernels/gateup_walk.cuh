// What a thread block works on, and in which order; the picture is at the head of w3_decode.cu.
#pragma once
#include "gateup_params.cuh"

// a / b without a division, for (a + 1) * b < 2^32; `reciprocal` is (2^32 - 1) / b.
W3_DEVICE int quotient(int a, u32 reciprocal) {
  return static_cast<int>(__umulhi(static_cast<u32>(a) + 1, reciprocal));
}

// The walk over a run of units (row block, piece), row block by row block, the last one first. begin_of and end_of are the pieces of
// it in a row block. Every thread block has at least one unit.
struct Walk {
  int first, last;              // units [first, last)
  int first_block, last_block;  // row blocks
  int pieces;

  W3_DEVICE Walk(const Params& p, int block) : pieces(p.pieces) {
    first = start_of(p, block);
    last = start_of(p, block + 1);
    first_block = quotient(first, p.piece_reciprocal);
    last_block = quotient(last - 1, p.piece_reciprocal);
  }

  static W3_DEVICE int start_of(const Params& p, int block) { return block * p.run_units + min(block, p.longer_runs); }

  W3_DEVICE int begin_of(int row_block) const { return max(first - row_block * pieces, 0); }
  W3_DEVICE int end_of(int row_block) const { return min(last - row_block * pieces, pieces); }
};

#if __CUDA_ARCH__ >= 900
// Whether this lane arrives at a barrier for its warp.
W3_DEVICE bool arrives() {
  return GU_CHECKED || elect_one();
}
#endif

// First rows of the two halves of a row block. A pair has the same rows of both matrices; a single matrix has neighbours.
W3_DEVICE int first_row(int row_block) {
  return row_block * (kPaired ? kHalfRows : 2 * kHalfRows);
}
W3_DEVICE int second_row(int row_block) {
  return first_row(row_block) + (kPaired ? 0 : kHalfRows);
}
