// y = x W^T + bias for many tokens, W in W3 form: codes become weights in registers, once for each block tile, beside the tensor cores.
//
// Shapes: x [tokens, columns] float16 or bfloat16 through a tensor map, codes [row tiles, column tiles, vectors, 32, 4], scales
// [row tiles, groups, 8, 8], qmap [maps, 8] -> y [tokens, rows] of x's dtype. Any number of rows, columns, tokens; the rows of x begin at
// multiples of 16 bytes.
//
// The weights are those of w3_dequantize.cu to the last bit, sums are float32, rounded once.
//
//     feeder 0   | waits for an empty slot, asks for codes and scales of all row tiles    | 4 warps, two of them idle
//     feeder 1   | waits for an empty slot, asks for activations                          |
//     group 0    | decodes 64 rows x 64 columns, multiplies by kTokens tokens             | 4 warps
//     group 1    | the same                                                               | 4 warps
//
// A step is 64 columns. Weights are the A operand, from registers; activations the B operand, from shared memory as the copy engine wrote
// them. Sums stay in registers over all columns. A step is decoded while the one before is multiplied:
//
//     tensor cores   | s - 1 | s                                        | s + 1
//     a warpgroup    | asks for s; codes and maps of s + 1 | s - 1 is done: its slot is free | decodes s + 1 | asks for s + 1; ...
//
// The two warpgroups have a row tile each: a block tile is 128 rows x kTokens tokens. Or (kSplit) they share one, 64 rows, and take its steps
// in turn; in the end they add up. The work for each weight and token is the same then, and there are twice as many tiles, but each
// needs as many activations as one of 128 rows. That is for matrices with too few rows to go round.
//
// Blocks are persistent: feeders fill slots for the next tile while workers write the last one. In a cluster of two blocks, one below the
// other, each fetches half of the tokens for both: with 128 rows a multiprocessor asks the L2 cache for 20 instead of 36 KB a step of 256
// tokens. Clusters of four took as long as two at best, and twice as long where tiles keep all multiprocessors busy.
#include "w3_prefill_decode.cuh"
#include "w3_prefill_feed.cuh"
#include "w3_prefill_finish.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
// This warp is done with a slot: the instructions that read its activations have finished, and its code words are in registers that have
// been used. So no reading is under way that what the copy engine writes next could overtake, and no fence is needed.
W3_DEVICE void leave(const SharedMap& map, int slot) {
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

// Starts a step's four instructions, as one group.
W3_DEVICE void multiply(float (&sums)[kSums], const u32 (&a)[4][4], u64 b) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) wgmma_wide<kBf16>(sums, a[s], b + s * kNextSixteen);
  wgmma_commit();
}

// What a warpgroup knows of the step that it decodes.
struct Decoder {
  const SharedMap& map;
  const MapValues upper, lower;  // of the lane's two rows
  const Exchange exchange;
  const BlockPlace words;
  const u32 weights;  // of the warpgroup's row tile, in the first slot
  const int tiles_per_group;
  int until;  // steps from the one looked at last to where its group ends
  Map<false> maps[2];
  u32 selector[4];

  // Waits for the step at `place` and makes ready what its operands are looked up by.
  W3_DEVICE void look(const Place& place) {
    RawBlock raw;
    u32 own[4];
    barrier_wait(map.full + 8 * place.slot, place.parity);
    raw.load(weights + place.slot * kWeightBytes, words);
    raw.selectors(own);
    exchange(own, selector);
    until -= kStride;
    if (until <= 0) {
      maps[0] = scaled_map(upper, raw.scale(0));
      maps[1] = scaled_map(lower, raw.scale(1));
      until = max(until + tiles_per_group, 1);
    }
  }
  W3_DEVICE void decode(u32 (&a)[4][4]) const {
#pragma unroll
    for (int s = 0; s < 4; ++s) operand(selector[s], maps[0], maps[1], a[s]);
  }
};

// Multiplies the step at `place` by what `a` has, and decodes the next step into `next` meanwhile, if there is one.
W3_DEVICE void step_on(Decoder& decoder, float (&sums)[kSums], const u32 (&a)[4][4], u32 (&next)[4][4], Place& place, int& last_slot,
                       bool more) {
  const int slot = place.slot;
  multiply(sums, a, swizzled_descriptor(decoder.map.x) + static_cast<u32>(slot * (kXBytes >> 4)));
  place.advance(kStride);
  if (more) decoder.look(place);
  wgmma_wait<1>();  // of the step before: the slot is free, and what its instructions read may change
  if (last_slot >= 0) leave(decoder.map, last_slot);
  last_slot = slot;
  if (more) decoder.decode(next);
}

// What a warpgroup does.
W3_DEVICE void work(const Params& p, const SharedMap& map, int group, int rank) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int block = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);  // of 16 rows: the warp's part of a matrix instruction
  const Exchange exchange(lane % 4);
  const BlockPlace words(block, lane);
  const int first_step = kSplit ? group : 0;
  Place tile_place = {0, 0};
  int turn = 0;
  wait_for_predecessors();
#pragma unroll 1
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
    const int row_tile = min(tile.row_tile + (kSplit ? 0 : group), p.row_tiles - 1);
    const i64 row = row_tile * 64ll + 16 * block + lane / 4, shared_map = p.map_tiles ? row_tile / p.map_tiles : 0;
    Decoder decoder = {map, MapValues(p.qmap, kRowMaps ? row : shared_map), MapValues(p.qmap, kRowMaps ? row + 8 : shared_map),
                       exchange, words, map.weights + (kSplit ? 0 : group * kRowTileBytes), p.tiles_per_group, kStride - first_step};

    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    u32 a[2][4][4];
    Place place = tile_place;
    place.advance(first_step);
    decoder.look(place);
    decoder.decode(a[0]);
    int last_slot = -1, step = first_step;
#pragma unroll 1
    for (; step + kStride < p.steps; step += 2 * kStride) {
      step_on(decoder, sums, a[0], a[1], place, last_slot, true);
      step_on(decoder, sums, a[1], a[0], place, last_slot, step + 2 * kStride < p.steps);
    }
    if (step < p.steps) step_on(decoder, sums, a[0], a[1], place, last_slot, false);
    wgmma_wait<0>();
    leave(map, last_slot);
    tile_place.advance_far(p.steps);
    if constexpr (kSplit)
      finish_shared(p, tile, map.out, group, thread, sums);
    else
      finish(p, tile, map.out, group, thread, turn, sums);
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
