// How weights and staged activations get into shared memory.
//
// From sm_90 on four extra warps feed the others. The first asks for weights, a slot (some steps of every row tile) at a time: for each
// row tile one bulk copy of codes and one of scales, since the steps of a row tile follow each other in memory. Activations are
// staged by everybody for the first chunk of steps, when there is nothing else to do, and by the other three warps from then on; or
// one thread copies what w3_stage.cu staged. Workers only wait and say when a slot is free.
// Before sm_90 each worker asks for its own weights with 16-byte copies, and all of them stage activations before they start.
#pragma once
#include "w3_partition.cuh"

// Addresses in shared memory: slots | staged activations | their scales | exchange | barriers.
struct SharedMap {
  u32 slots, x, x_scales, exchange;
  u32 full, empty;      // [slot], both
  u32 x_full, x_empty;  // [chunk], or [ring slot] both

  W3_DEVICE SharedMap(u32 base, int x_steps) {
    slots = base;
    x = slots + kSlots * kSlotBytes;
    x_scales = x + x_steps * kStepXBytes;
    exchange = x_scales + x_steps * kStepXScales * 4;
    full = exchange + (kSplitWarps > 1 ? kWarps * kQuads * 512 : 0);
    empty = full + 8 * kSlots;
    x_full = empty + 8 * kSlots;
    x_empty = x_full + 8 * (kStagedX > 0 ? kStagedX : 0);
  }
};

W3_DEVICE int group_of_tile(const Params& p, int tile) {
  return quotient(min(tile, p.column_tiles - 1), p.group_reciprocal);
}

// Activations of this block: which step comes when. A block whose run covers a whole row of steps keeps all of them, otherwise its
// run's steps. `place` counts from the first that is used.
struct ActivationOrder {
  int count, first;  // steps kept; the first one's number
  bool whole;

  W3_DEVICE ActivationOrder(const Params& p, const Walk& walk) {
    const int length = walk.run.last - walk.run.first;
    whole = length >= p.steps;
    count = whole ? p.steps : length;
    first = walk.begin_of(walk.last_block);
  }
  // Where a step lies among those kept. In a run over two row blocks the last one's steps, which start at 0, are used first.
  W3_DEVICE int place(const Walk& walk, int row_block, int step) const {
    if (whole) return step >= first ? step - first : step - first + count;
    return row_block == walk.last_block ? step - first : walk.end_of(walk.last_block) - first + step - walk.begin_of(row_block);
  }
  W3_DEVICE int step(const Params& p, const Walk& walk, int place) const {
    if (whole) return first + place < count ? first + place : first + place - count;
    const int of_last = walk.end_of(walk.last_block) - first;
    return place < of_last ? first + place : walk.begin_of(walk.first_block) + place - of_last;
  }
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
      place[i] = begin + row;
      raw[i] = load_eight(in, token[i], order.step(p, walk, place[i]) * kStepColumns + 8 * part16);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      stage_eight<kBf16, kInt8Map, kWarpgroups, kTokenTiles, kTokenWarps>(
          raw[i], part16, token[i], x_out + place[i] * kStepXBytes, scales_out + place[i] * kStepXScales);
  }
}

W3_DEVICE int chunk_of(const Params& p, int place) {
  return place < p.first_chunk ? 0 : 1 + quotient(place - p.first_chunk, p.chunk_reciprocal);
}

#if __CUDA_ARCH__ >= 900
// By the first warp: [full | empty | x_full | x_empty], as SharedMap has them.
W3_DEVICE void init_barriers(const Params& p, const SharedMap& map) {
  const int x_barriers = kStagedX > 0 ? kStagedX : kKeepsX ? p.chunks : 0;
  for (int i = threadIdx.x; i < 2 * kSlots + x_barriers + max(kStagedX, 0); i += 32) {
    const int chunk = i - 2 * kSlots;
    const int to_keep = kStagedX == kKept ? 1 : chunk == 0 && kWorkersStage ? kWarps + 3 : 3;
    const int arrivals = i < kSlots ? 1 : i < 2 * kSlots ? kSlotReaders : chunk >= x_barriers ? kWarps : kStagedX > 0 ? 1 : to_keep;
    barrier_init(map.full + 8 * i, arrivals);
  }
  barrier_init_fence();
}

// One warp: the weights, slot by slot; lane r asks for row tile r of the row block.
W3_DEVICE void feed_weights(const Params& p, const Walk& walk, const SharedMap& map, int lane) {
  int slot = 0;
  u32 parity = 1;  // the first wait on a fresh barrier passes
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block) {
    // a row tile past the matrix stands for the last one; what comes of it is not written
    const i64 row_tile = min(row_block * kRowWarps + lane, p.row_tiles - 1);
    const int begin = walk.begin_of(row_block), end = walk.end_of(row_block);
    const char* codes = p.codes + (row_tile * p.column_tiles + 2 * begin) * kTileBytes;
    const char* const scales = p.scales + row_tile * p.groups * 128;
#pragma unroll 1
    for (int base = begin; base < end; base += kSlotSteps) {
      const int last_tile = min(2 * min(base + kSlotSteps, end), p.column_tiles) - 1;
      const int first_group = quotient(2 * base, p.group_reciprocal), last_group = quotient(last_tile, p.group_reciprocal);
      const u32 code_bytes = (last_tile + 1 - 2 * base) * kTileBytes, scale_bytes = (last_group + 1 - first_group) * 128;
      const u32 x_bytes = kStagedX == kStreamed ? min(kSlotSteps, end - base) * (kStepXBytes + kStepXScales * 4) : 0;
      const u32 full = map.full + 8 * slot, to = map.slots + slot * kSlotBytes + lane * kSlotRowBytes;
      barrier_wait(map.empty + 8 * slot, parity);
      if (lane == 0) barrier_expect(full, kRowWarps * (code_bytes + scale_bytes) + x_bytes);
      __syncwarp();
      if (lane < kRowWarps) {
        copy_bulk(to, codes, code_bytes, full);
        copy_bulk(to + kSlotCodeBytes, scales + first_group * 128, scale_bytes, full);
      }
      __syncwarp();
      codes += kSlotCodeBytes;
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
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block)
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

// One thread: staged activations beside the weights of each slot. Its bytes are part of what feed_weights announces; a barrier takes
// them before or after the announcement.
W3_DEVICE void feed_streamed(const Params& p, const Walk& walk, const SharedMap& map) {
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block) {
    const int end = walk.end_of(row_block);
#pragma unroll 1
    for (int step = walk.begin_of(row_block); step < end; step += kSlotSteps) {
      const int count = min(kSlotSteps, end - step);
      const u32 full = map.full + 8 * slot, to = map.slots + slot * kSlotBytes;
      barrier_wait(map.empty + 8 * slot, parity);
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
  int place = 0;
#pragma unroll 1
  for (int chunk = 0; place < order.count; ++chunk) {
    const u32 full = map.x_full + 8 * chunk;
    const int end = min(p.first_chunk + chunk * p.chunk_steps, order.count);
    barrier_expect(full, (end - place) * (kStepXBytes + kStepXScales * 4));
#pragma unroll 1
    for (; place < end; ++place) {
      const i64 step = order.step(p, walk, place);
      copy_bulk(map.x + place * kStepXBytes, p.staged + step * kStepXBytes, kStepXBytes, full);
      copy_bulk(map.x_scales + place * kStepXScales * 4, p.staged_scales + step * kStepXScales, kStepXScales * 4, full);
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
  if (lane == 0) barrier_arrive(map.x_full + 8 * chunk);
}

// The four feeding warps.
W3_DEVICE void feed(const Params& p, const Walk& walk, const SharedMap& map, char* shared, int feeder, int lane) {
  if (feeder == 0) {
    feed_weights(p, walk, map, lane);  // weights do not depend on earlier kernels
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
  } else if (feeder == 1 && elect_one()) {
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
