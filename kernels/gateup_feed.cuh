// How weights and activations get into shared memory: one thread asks for weights, another for activations.
//
// Weights of a slot are kPiece columns of both halves of a row block: one instruction for each half and 128 columns. What lies beyond the
// matrix arrives as zeros. Activations are copied as they are: of each token the columns of the slot. In float16 their bytes count
// towards the slot's barrier; in bfloat16 they have a barrier of their own, on which the converting warps wait (gateup_convert.cuh), and
// these arrive at the slot's barrier.
#pragma once
#include "gateup_walk.cuh"

#if __CUDA_ARCH__ >= 900
// By one warp: [full | empty | raw], as SharedMap has them.
W3_DEVICE void init_barriers(const SharedMap& map) {
  for (int i = threadIdx.x % 32; i < 3 * kSlots; i += 32) {
    const int kind = i / kSlots;
    barrier_init(map.full + 8 * i, kind == 0 ? 1 + kConverters * kArrivals : kind == 1 ? kWarps * kArrivals : 1);
  }
  barrier_init_fence();
}

// Bytes of a token's activations in a piece.
W3_DEVICE u32 token_bytes(const Params& p, int piece) {
  return 2 * min(kPiece, p.columns - piece * kPiece);
}

// One thread: weights of every unit, in the order of the walk.
W3_DEVICE void feed_weights(const Params& p, const Walk& walk, const SharedMap& map) {
  int slot = 0;
  u32 parity = 1;  // the first wait on a fresh barrier passes
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block) {
    const int row0 = first_row(row_block), row1 = second_row(row_block), end = walk.end_of(row_block);
#pragma unroll 1
    for (int piece = walk.begin_of(row_block); piece < end; ++piece) {
      const int column = piece * kPiece;
      const int parts = (min(kPiece, p.columns - column) + kBlock - 1) / kBlock;
      const u32 full = map.full + 8 * slot, to = map.slots + slot * kSlotBytes;
      barrier_wait(map.empty + 8 * slot, parity);
      barrier_expect(full, parts * 2 * kHalfBytes + (kBf16 ? 0 : p.tokens * token_bytes(p, piece)));
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (part < parts) {
          copy_box(to + 2 * part * kHalfBytes, p.first_map, column + part * kBlock, row0, full);
          copy_box(to + (2 * part + 1) * kHalfBytes, p.second_map, column + part * kBlock, row1, full);
        }
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// One thread: activations beside the weights of each slot. A barrier takes their bytes before or after feed_weights announces them.
W3_DEVICE void feed_activations(const Params& p, const Walk& walk, const SharedMap& map) {
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block)
#pragma unroll 1
    for (int piece = walk.begin_of(row_block); piece < walk.end_of(row_block); ++piece) {
      const u32 bytes = token_bytes(p, piece), barrier = (kBf16 ? map.raw : map.full) + 8 * slot;
      const u16* from = p.x + piece * kPiece;
      u32 to = map.x + slot * map.x_place;
      barrier_wait(map.empty + 8 * slot, parity);
      if constexpr (kBf16) barrier_expect(barrier, p.tokens * bytes);
#pragma unroll 1
      for (int token = 0; token < p.tokens; ++token) {
        copy_bulk(to, from, bytes, barrier);
        to += kTokenPitch;
        from += p.x_stride;
      }
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
}

// The two feeding warps.
W3_DEVICE void feed(const Params& p, const Walk& walk, const SharedMap& map, int feeder) {
  if (!elect_one()) return;
  if (feeder == 0) {
    prefetch_map(p.first_map);
    prefetch_map(p.second_map);
    feed_weights(p, walk, map);  // weights do not depend on earlier kernels
  } else {
    wait_for_predecessors();
    feed_activations(p, walk, map);
  }
}
#endif
