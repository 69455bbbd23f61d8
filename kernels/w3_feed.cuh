// How weights and staged activations get into shared memory.
//
// From sm_90 on four extra warps feed the others. Weights are asked for a slot (some steps of every row tile) at a time: for each row
// tile one bulk copy of codes and one of scales, since the steps of a row tile follow each other in memory. Three warps share
// the row tiles. Activations that w3_stage.cu staged are copied by the fourth. Where the block stages its own, everybody stages the first chunk of steps, when there is nothing else to do, and
// three of the four go on. Workers only wait and say when a slot is free.
// Before sm_90 each worker asks for its own weights with 16-byte copies, and all of them stage activations before they start.
#pragma once
#include "w3_partition.cuh"

// Addresses in shared memory: slots | staged activations | their scales | exchange | the cluster's sums | barriers.
struct SharedMap {
  u32 slots, x, x_scales, exchange, sums;
  u32 full, empty;      // [slot], both
  u32 x_full, x_empty;  // [chunk], or [ring slot] both
  u32 sums_full, sums_read;  // in a cluster

  W3_DEVICE SharedMap(u32 base, int x_steps) {
    slots = base;
    x = slots + kSlots * kSlotBytes;
    x_scales = x + x_steps * kStepXBytes;
    exchange = x_scales + x_steps * kStepXScales * 4;
    sums = exchange + (kSplitWarps > 1 ? kWarps * kQuads * 512 : 0);
    sums_full = sums + kSumBytes;
    sums_read = sums_full + 8;
    full = sums_full + (kCluster > 1 ? 16 : 0);
    empty = full + 8 * kSlots;
    x_full = empty + 8 * kSlots;
    x_empty = x_full + 8 * (kStagedX > 0 ? kStagedX : 0);
  }
};

W3_DEVICE int group_of_tile(const Params& p, int tile) {
  return quotient(min(tile, p.column_tiles - 1), p.group_reciprocal);
}

// Activations of this block: which step comes when, and where it is kept. A block whose run covers a whole row of steps keeps all of
// them, each at its own place; otherwise its run's steps, in the order of their use.
struct ActivationOrder {
  int count, first;  // steps kept; the one that is used first
  int base;          // the step at place 0, where each has its own
  bool whole;

  W3_DEVICE ActivationOrder(const Params& p, const Walk& walk) {
    const int length = walk.run.last - walk.run.first;
    whole = kCluster > 1 || length >= p.steps;
    count = kCluster == 1 && whole ? p.steps : length;
    first = walk.begin_of(walk.last_block);
    base = kCluster > 1 ? first : 0;
  }
  // The step that is used as number `turn`. In a run over two row blocks the last one's steps, which end a row, are used first.
  W3_DEVICE int step(const Params& p, const Walk& walk, int turn) const {
    if (whole) return first + turn < base + count ? first + turn : first + turn - count;
    const int of_last = walk.end_of(walk.last_block) - first;
    return turn < of_last ? first + turn : walk.begin_of(walk.first_block) + turn - of_last;
  }
  W3_DEVICE int place(int turn, int step) const { return whole ? step - base : turn; }
};

// Stages tokens x steps [begin, end) of the order, `warps` warps sharing the work, two tasks (step, token) a warp at a time.
W3_DEVICE void stage_steps(const Params& p, const Walk& walk, const ActivationOrder& order, int begin, int end, int warp, int warps,
                           int lane, char* x_out, float* scales_out) {
  constexpr int kTogether = kWorkerRegisters < 128 ? 2 : 4;
  const Activations in = {p.x, p.x_stride, p.tokens, p.columns, p.x_aligned};
  const int tasks = (end - begin) * p.tokens, part16 = lane % 16;
#pragma unroll 1
  for (int base = 2 * warp; base < tasks; base += 2 * warps * kTogether) {
    Vec4 raw[kTogether];
    int token[kTogether], place[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {  // tasks past the last repeat it: no branch, so that the chains run side by side
      const int task = min(base + 2 * warps * i + lane / 16, tasks - 1);
      const int row = quotient(task, p.token_reciprocal);
      token[i] = task - row * p.tokens;
      const int step = order.step(p, walk, begin + row);
      place[i] = order.place(begin + row, step);
      raw[i] = load_eight(in, token[i], step * kStepColumns + 8 * part16);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      stage_eight<kBf16, kInt8Map, kWarpgroups, kTokenTiles, kTokenWarps, kBeside>(
          raw[i], part16, token[i], x_out + place[i] * kStepXBytes, scales_out + place[i] * kStepXScales);
  }
}

W3_DEVICE int chunk_of(const Params& p, int turn) {
  return turn < p.first_chunk ? 0 : 1 + quotient(turn - p.first_chunk, p.chunk_reciprocal);
}

#if __CUDA_ARCH__ >= 900
// Whether this lane arrives at a barrier for its warp.
W3_DEVICE bool arrives() {
  return W3_CHECKED || elect_one();
}

// One thread: [full | empty | x_full | x_empty], as SharedMap has them.
W3_DEVICE void init_barriers(const Params& p, const SharedMap& map) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    barrier_init(map.full + 8 * i, min(kWeightFeeders, kRowWarps) + (kStagedX == kStreamed));  // each feeder announces its bytes
    barrier_init(map.empty + 8 * i, kSlotReaders * kArrivals);
  }
  if constexpr (kStagedX > 0)
#pragma unroll
    for (int i = 0; i < kStagedX; ++i) {
      barrier_init(map.x_full + 8 * i, 1);
      barrier_init(map.x_empty + 8 * i, kWarps * kArrivals);
    }
  if constexpr (kCluster > 1) {
    barrier_init(map.sums_full, kWarps);
    barrier_init(map.sums_read, kWarps * (kCluster - 1));
  }
  if constexpr (kKeepsX)
    for (int i = 0; i < p.chunks; ++i)
      barrier_init(map.x_full + 8 * i, kStagedX == kKept ? 1 : (i == 0 && kWorkersStage ? kWarps + 3 : 3) * kArrivals);
  barrier_init_fence();
}

// One thread: the weights of row tiles feeder, feeder + kWeightFeeders, ... of the row block, slot by slot.
W3_DEVICE void feed_weights(const Params& p, const Walk& walk, const SharedMap& map, int feeder) {
  constexpr int kMine = (kRowWarps + kWeightFeeders - 1) / kWeightFeeders;
  int slot = 0;
  u32 parity = 1;  // the first wait on a fresh barrier passes
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; row_block -= walk.stride) {
    const int begin = walk.begin_of(row_block), end = walk.end_of(row_block);
    const char *codes[kMine], *scales[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      // a row tile past the matrix stands for the last one; what comes of it is not written
      const i64 row_tile = min(row_block * kRowWarps + feeder + i * kWeightFeeders, p.row_tiles - 1);
      codes[i] = p.codes + (row_tile * p.column_tiles + 2 * begin) * kTileBytes;
      scales[i] = p.scales + row_tile * p.groups * 128;
    }
#pragma unroll 1
    for (int base = begin; base < end; base += kSlotSteps) {
      const int last_tile = min(2 * min(base + kSlotSteps, end), p.column_tiles) - 1;
      const int first_group = quotient(2 * base, p.group_reciprocal), last_group = quotient(last_tile, p.group_reciprocal);
      const u32 code_bytes = (last_tile + 1 - 2 * base) * kTileBytes, scale_bytes = (last_group + 1 - first_group) * 128;
      const u32 full = map.full + 8 * slot, to = map.slots + slot * kSlotBytes + feeder * kSlotRowBytes;
      barrier_wait(map.empty + 8 * slot, parity);
      barrier_expect(full, (kRowWarps - feeder + kWeightFeeders - 1) / kWeightFeeders * (code_bytes + scale_bytes));
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (i * kWeightFeeders + kWeightFeeders <= kRowWarps || i * kWeightFeeders + feeder < kRowWarps) {
          copy_bulk(to + i * kWeightFeeders * kSlotRowBytes, codes[i], code_bytes, full);
          copy_bulk(to + i * kWeightFeeders * kSlotRowBytes + kSlotCodeBytes, scales[i] + first_group * 128, scale_bytes, full);
        }
        codes[i] += kSlotCodeBytes;
      }
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// One thread: staged activations of every step, in the order of the walk.
W3_DEVICE void feed_ring(const Params& p, const Walk& walk, const SharedMap& map) {
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; row_block -= walk.stride)
#pragma unroll 1
    for (int step = walk.begin_of(row_block); step < walk.end_of(row_block); ++step) {
      const u32 full = map.x_full + 8 * slot;
      barrier_wait(map.x_empty + 8 * slot, parity);
      barrier_expect(full, kStepXBytes + kStepXScales * 4);
      copy_bulk(map.x + slot * kStepXBytes, p.staged + static_cast<i64>(step) * kStepXBytes, kStepXBytes, full);
      copy_bulk(map.x_scales + slot * kStepXScales * 4, p.staged_scales + static_cast<i64>(step) * kStepXScales, kStepXScales * 4, full);
      if (++slot == kStagedX) {
        slot = 0;
        parity ^= 1;
      }
    }
}

// One thread: staged activations beside the weights of each slot.
W3_DEVICE void feed_streamed(const Params& p, const Walk& walk, const SharedMap& map) {
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; row_block -= walk.stride) {
    const int end = walk.end_of(row_block);
#pragma unroll 1
    for (int step = walk.begin_of(row_block); step < end; step += kSlotSteps) {
      const int count = min(kSlotSteps, end - step);
      const u32 full = map.full + 8 * slot, to = map.slots + slot * kSlotBytes;
      barrier_wait(map.empty + 8 * slot, parity);
      barrier_expect(full, count * (kStepXBytes + kStepXScales * 4));
      copy_bulk(to + kSlotXAt, p.staged + static_cast<i64>(step) * kStepXBytes, count * kStepXBytes, full);
      copy_bulk(to + kSlotScalesAt, p.staged_scales + static_cast<i64>(step) * kStepXScales, count * kStepXScales * 4, full);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// One thread: staged activations of every step that this block keeps.
W3_DEVICE void feed_kept(const Params& p, const Walk& walk, const SharedMap& map) {
  const ActivationOrder order(p, walk);
  int turn = 0;
#pragma unroll 1
  for (int chunk = 0; turn < order.count; ++chunk) {
    const u32 full = map.x_full + 8 * chunk;
    const int end = min(p.first_chunk + chunk * p.chunk_steps, order.count);
    barrier_expect(full, (end - turn) * (kStepXBytes + kStepXScales * 4));
#pragma unroll 1
    while (turn < end) {  // steps that follow each other go together
      const i64 step = order.step(p, walk, turn);
      const int place = order.place(turn, step);
      int count = 1;
      while (turn + count < end && order.step(p, walk, turn + count) == step + count) ++count;
      copy_bulk(map.x + place * kStepXBytes, p.staged + step * kStepXBytes, count * kStepXBytes, full);
      copy_bulk(map.x_scales + place * kStepXScales * 4, p.staged_scales + step * kStepXScales, count * kStepXScales * 4, full);
      turn += count;
    }
  }
}

// A warp's part of a chunk of activations that this block stages itself.
W3_DEVICE void stage_chunk(const Params& p, const Walk& walk, const ActivationOrder& order, const SharedMap& map, char* shared, int chunk,
                           int warp, int warps, int lane) {
  const int begin = chunk == 0 ? 0 : p.first_chunk + (chunk - 1) * p.chunk_steps;
  const int end = min(p.first_chunk + chunk * p.chunk_steps, order.count);
  stage_steps(p, walk, order, begin, end, warp, warps, lane, shared + (map.x - map.slots),
              reinterpret_cast<float*>(shared + (map.x_scales - map.slots)));
  if constexpr (kWarpgroups) fence_async_shared();  // the tensor cores will read what this warp wrote
  __syncwarp();
  if (arrives()) barrier_arrive(map.x_full + 8 * chunk);
}

// The feeding warps.
W3_DEVICE void feed(const Params& p, const Walk& walk, const SharedMap& map, char* shared, int feeder, int lane) {
  if (feeder < kWeightFeeders) {
    if (feeder < kRowWarps && elect_one()) feed_weights(p, walk, map, feeder);  // weights do not depend on earlier kernels
    return;
  }
  if constexpr (kStagedX == kOwn) {
    wait_for_predecessors();
    const ActivationOrder order(p, walk);
    const int chunks = chunk_of(p, order.count - 1) + 1;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int helpers = chunk == 0 && kWorkersStage ? kWarps : 0;
      stage_chunk(p, walk, order, map, shared, chunk, feeder - 1 + helpers, 3 + helpers, lane);
    }
  } else if (elect_one()) {
    wait_for_predecessors();
    if constexpr (kStagedX > 0) feed_ring(p, walk, map);
    if constexpr (kStagedX == kKept) feed_kept(p, walk, map);
    if constexpr (kStagedX == kStreamed) feed_streamed(p, walk, map);
  }
}
#endif

// Before sm_90: one step by 16-byte copies of all lanes of its worker.
W3_DEVICE void copy_step(const Params& p, int row_tile, int step, u32 codes_to, u32 scales_to, int lane) {
  const i64 row = min(row_tile, p.row_tiles - 1);
  const int tile = 2 * step;
  const char* const codes = p.codes + (row * p.column_tiles + tile) * kTileBytes;
  const bool both = !kHalfStep || tile + 1 < p.column_tiles;
#pragma unroll
  for (int v = 0; v < 2 * kVectors; ++v)
    if (v < kVectors || both) copy_async16(codes_to + (v * 32 + lane) * 16, codes + (v * 32 + lane) * 16);
#pragma unroll
  for (int set = 0; set < kScaleSets; ++set)
    if (lane / 8 == set)
      copy_async16(scales_to + 16 * lane, p.scales + (row * p.groups + group_of_tile(p, tile + set)) * 128 + 16 * (lane % 8));
}
