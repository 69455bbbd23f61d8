// y = x W^T + bias for many tokens, W in W3 form: codes become weights in registers, once for each block tile, beside the tensor cores.
//
// Shapes: x [tokens, columns] float16 or bfloat16 through a tensor map, codes [row tiles, column tiles, vectors, 32, 4], scales
// [row tiles, groups, 8, 8], qmap [maps, 8] -> y [tokens, rows] of x's dtype. Any number of rows, columns, tokens; the rows of x begin at
// multiples of 16 bytes.
//
// The weights are those of w3_dequantize.cu to the last bit, sums are float32, rounded once.
//
//     feeder 0   | waits for an empty slot, asks for codes and scales of both row tiles   | 4 warps, two of them idle
//     feeder 1   | waits for an empty slot, asks for activations                          |
//     group 0    | row tile 0: decodes 64 rows x 16 columns, multiplies by kTokens tokens | 4 warps
//     group 1    | row tile 1                                                             | 4 warps
//
// A block tile is 128 rows x kTokens tokens, a step 64 columns. Weights are the A operand, from registers; activations the B operand,
// from shared memory as the copy engine wrote them. Sums stay in registers over all columns. The fragments of 16 columns are
// decoded two instructions ahead of their use, while the two before are in flight:
//
//     tensor cores   | 0 (s)  | 1 (s)  | 2 (s)    | 3 (s)    | 0 (s+1)
//     decoding       | 2 (s)  | 3 (s)  | 0 (s+1)  | 1 (s+1)  | 2 (s+1)
//     beside it      | codes of s+1 out of their slot | exchange; slot of s-1 is free | maps of s+1
//
// Blocks are persistent: feeders fill slots for the next tile while workers write the last one. In a cluster of two blocks, one below the
// other, each fetches half of the tokens for both: a multiprocessor asks the L2 cache for 20 instead of 36 KB a step of 256 tokens.
#include "w3_prefill_decode.cuh"
#include "w3_prefill_feed.cuh"
#include "w3_prefill_finish.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
// This warp is done with a slot: its code words have been read and the instructions that read its activations have finished.
W3_DEVICE void leave(const SharedMap& map, int slot) {
  fence_async_shared();  // what was read here, the copy engine writes next
  __syncwarp();
  if (W3_CHECKED || elect_one()) {
    if constexpr (kCluster == 1) {
      barrier_arrive(map.empty + 8 * slot);
    } else {
#pragma unroll
      for (int block = 0; block < kCluster; ++block) cluster_arrive(in_block(map.empty + 8 * slot, block));
    }
  }
}

// Multiplies 16 columns and waits until all but the latest two instructions have finished, so that what the third last read may change.
W3_DEVICE void multiply(float (&sums)[kSums], const u32 (&a)[4], u64 b) {
  wgmma_fence();
  wgmma_wide<kBf16>(sums, a, b);
  wgmma_commit();
  wgmma_wait<2>();
}

// What a warpgroup does.
W3_DEVICE void work(const Params& p, const SharedMap& map, int group, int rank) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int block = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);  // of 16 rows: the warp's part of a matrix instruction
  const Exchange exchange(lane % 4);
  const BlockPlace words(block, lane);
  const u32 my_weights = map.weights + group * kRowTileBytes;
  const u64 x = swizzled_descriptor(map.x);
  Place place = {0, 0};
  int turn = 0;
  wait_for_predecessors();
#pragma unroll 1
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
    const int row_tile = min(tile.row_tile + group, p.row_tiles - 1);
    const i64 row = row_tile * 64ll + 16 * block + lane / 4, shared_map = p.map_tiles ? row_tile / p.map_tiles : 0;
    const MapValues upper(p.qmap, kRowMaps ? row : shared_map), lower(p.qmap, kRowMaps ? row + 8 : shared_map);

    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    RawBlock raw;
    u32 own[4], selector[4], a[4][4];
    barrier_wait(map.full + 8 * place.slot, place.parity);
    raw.load(my_weights + place.slot * kGroups * kRowTileBytes, words);
    raw.selectors(own);
    exchange(own, selector);
    Map<false> maps[2] = {scaled_map(upper, raw.scale(0)), scaled_map(lower, raw.scale(1))};
    operand(selector[0], maps[0], maps[1], a[0]);
    operand(selector[1], maps[0], maps[1], a[1]);

    int last_slot = -1;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const int slot = place.slot;
      const u64 b = x + static_cast<u32>(slot * (kXBytes >> 4));
      place.next();

      multiply(sums, a[0], b);
      operand(selector[2], maps[0], maps[1], a[2]);
      if (step + 1 < p.steps) {  // after the last step, what follows decodes the same words again, for nothing
        barrier_wait(map.full + 8 * place.slot, place.parity);
        raw.load(my_weights + place.slot * kGroups * kRowTileBytes, words);
      }

      multiply(sums, a[1], b + kNextSixteen);
      if (last_slot >= 0) leave(map, last_slot);  // its last instruction is the third last now
      last_slot = slot;
      operand(selector[3], maps[0], maps[1], a[3]);
      raw.selectors(own);
      exchange(own, selector);

      multiply(sums, a[2], b + 2 * kNextSixteen);
      maps[0] = scaled_map(upper, raw.scale(0));
      maps[1] = scaled_map(lower, raw.scale(1));
      operand(selector[0], maps[0], maps[1], a[0]);

      multiply(sums, a[3], b + 3 * kNextSixteen);
      operand(selector[1], maps[0], maps[1], a[1]);
    }
    wgmma_wait<0>();
    leave(map, last_slot);
    finish(p, tile, map.out + group * 2 * kChunkBytes, group, thread, turn, sums);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1) w3_prefill(const __grid_constant__ Params p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int rank = blockIdx.x % kCluster;
  const SharedMap map(shared_address(shared));
  if (warp == kWorkers) init_barriers(map, threadIdx.x % 32);
  if constexpr (kCluster > 1)
    cluster_barrier();  // nobody reaches a barrier of another block before it is there
  else
    __syncthreads();
  launch_dependents();
  if (warp < kWorkers) {
    registers_up<kWorkerRegisters>();
    work(p, map, warp / 4, rank);
  } else {
    registers_down<kFeederRegisters>();
    feed(p, map, warp - kWorkers, rank);
    __syncwarp();
  }
  if constexpr (kCluster > 1) cluster_barrier();  // nobody leaves while another block may still write or arrive here
#endif
}
