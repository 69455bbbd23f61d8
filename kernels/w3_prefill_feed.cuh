// How weights and activations get into shared memory: one thread asks for codes and scales, another for activations.
//
// Activations are boxes of the matrix x, swizzled by the copy engine. Tokens beyond the last and columns beyond x arrive as zeros and are
// counted too. The blocks of a cluster take the same tokens: each fetches its part of them and the copy engine writes it into the shared
// memory of all, at the same place, and counts it at everybody's barrier. So a slot is filled only once the workers of every block have
// left it.
#pragma once
#include "w3_prefill_params.cuh"

#if __CUDA_ARCH__ >= 900
// By one warp.
W3_DEVICE void init_barriers(const SharedMap& map, int lane) {
  for (int i = lane; i < 2 * kSlots; i += 32)
    barrier_init(map.full + 8 * i, i < kSlots ? 2 : kLeavers * kArrivals * kCluster);  // full: both feeders announce their bytes
  barrier_init_fence();
}

// As copy_box, into the same place of every block of the cluster that has a bit in `blocks`, counted at the same barrier of each.
W3_DEVICE void copy_box_to_all(u32 shared, const TensorMap& map, int column, int row, u32 barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// What a block does, one after the other: tiles index, index + stride, ... Token tiles run fastest, so that blocks which run side by side
// share their weights in the L2 cache.
struct Tile {
  int token;     // the first
  int row_tile;  // the first of this block; may lie beyond the matrix

  W3_DEVICE Tile(const Params& p, int index, int rank) {
    const int row_block = index / p.token_tiles;
    token = (index - row_block * p.token_tiles) * kTokens;
    row_tile = (row_block * kCluster + rank) * kRowTiles;
  }
};

// One thread: codes and scales of every step.
W3_DEVICE void feed_weights(const Params& p, const SharedMap& map, int rank) {
  Place place = {0, 1};  // the first wait on a fresh barrier passes
#pragma unroll 1
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
    const char *codes[kRowTiles], *scales[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const i64 row_tile = min(tile.row_tile + i, p.row_tiles - 1);  // what comes of a repeated row tile is not written
      codes[i] = p.codes + row_tile * p.column_tiles * kTileBytes;
      scales[i] = p.scales + row_tile * p.groups * kScaleBytes;
    }
    int left = p.tiles_per_group;  // steps of the group
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const u32 full = map.full + 8 * place.slot, to = map.weights + place.slot * kWeightBytes;
      barrier_wait(map.empty + 8 * place.slot, place.parity);
      barrier_expect(full, kWeightBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        copy_bulk(to + i * kRowTileBytes, codes[i], kTileBytes, full);
        copy_bulk(to + i * kRowTileBytes + kTileBytes, scales[i], kScaleBytes, full);
        codes[i] += kTileBytes;
        scales[i] += left == 1 ? kScaleBytes : 0;
      }
      left = left == 1 ? p.tiles_per_group : left - 1;
      place.next();
    }
  }
}

// One thread: activations of every step.
W3_DEVICE void feed_activations(const Params& p, const SharedMap& map, int rank) {
  constexpr int kPart = kTokens / kCluster;
  Place place = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const u32 full = map.full + 8 * place.slot, to = map.x + place.slot * kXBytes + rank * kPart * 128;
      barrier_wait(map.empty + 8 * place.slot, place.parity);
      barrier_expect(full, kXBytes);  // all parts, whoever fetches them
      if constexpr (kCluster == 1)
        copy_box(to, p.x_map, step * 128, tile.token, full);
      else
        copy_box_to_all(to, p.x_map, step * 128, tile.token + rank * kPart, full, (1 << kCluster) - 1);
      place.next();
    }
  }
}

// The feeding warps; two of the four have nothing to do.
W3_DEVICE void feed(const Params& p, const SharedMap& map, int feeder, int rank) {
  if (feeder > 1 || !elect_one()) return;
  if (feeder == 0) {
    feed_weights(p, map, rank);  // weights do not depend on earlier kernels
  } else {
    prefetch_map(p.x_map);
    wait_for_predecessors();
    feed_activations(p, map, rank);
  }
}
#endif
