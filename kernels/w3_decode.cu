// y = x W^T + bias for few tokens, W in W3 form. One persistent block on each multiprocessor; weights are read once.
//
// Shapes: x [tokens, columns], codes [row tiles, column tiles, vectors, 32, 4], scales [row tiles, groups, 8, 8], y [tokens, rows].
// Weights are the A operand (16 rows of output), tokens the N side (8 a tile), so one token costs no more than eight.
//
// Partition. A row block is kRowWarps row tiles (64 rows each), a step is 128 columns. The row blocks times the steps, K running
// fastest, are cut into equal runs, one for each block of threads:
//
//        step 0                              steps
//   row block 0  | c0 c0 c0 c0 c0 c0 c0 c1 c1 c1 |     c1 owns the end of row block 0: it adds what c0 left
//   row block 1  | c1 c1 c1 c1 c2 c2 c2 c2 c2 c2 |     c2 owns the end of row block 1
//   row block 2  | c2 c3 c3 c3 c3 c3 c3 c3 ...   |
//
// A thread block works through its row blocks from the last to the first. So the sum that another one needs is written first,
// and the one that it must collect itself comes last, when its writer is usually long done. A partial sum carries its own flag:
// the workspace holds a bit pattern no sum can have, the reader polls the data themselves and puts the pattern back. A reader
// only ever waits for blocks of lower index, which were started before it; and it adds in order of index, so two runs agree in
// every bit.
//
// With kCluster > 1 the blocks of a cluster take the same row blocks, each a part of the steps, and send their sums into each other's
// shared memory, where each block adds up a part: for small matrices and many tokens, where one block would add up what many left.
//
// Inside a thread block the working warp (r, k, w) takes row tile r of the row block, every kSplitWarps-th step from k, and token
// tiles of its own. Weights come through one ring of slots in shared memory that extra warps keep full with bulk copies (w3_feed.cuh);
// a slot holds kSlotSteps steps of every row tile. Codes go from the slot into registers, through `prmt`, into the matrix
// instructions (w3_words.cuh, w3_multiply.cuh); the sums of a step are multiplied by the group's scale and added up in float32.
//
// Activations are staged as B operands (w3_activations.cuh), by the block itself for the steps of its run, or once for all blocks
// by w3_stage.cu; then they are kept in shared memory, or streamed through a second ring when there are too many.
//
// A launch may begin while its predecessor in the stream ends: weights are asked for at once, everything that an earlier kernel
// may have written (x, the staged activations, the workspace, y's memory) is touched after wait_for_predecessors() only.
//
// Rejected after a trial: requests for weights by the working warps themselves (a third of their instructions), by one warp for all (3
// microseconds at 28672 x 8192, together with other changes of that version), one slot for each worker (5 % slower), staging before
// the main loop (with the rest of the prologue a quarter of the warps' samples), the last row block's products in flight into the next
// step (ptxas then serialises every wgmma), shifts as multiplications (another pipe, but 8 % slower), the next launch's first weights
// fetched into the L2 cache by w3_stage.cu (no change to more than twice the time), polling one word of a partial sum for all lanes
// (lanes are answered eight at a time: the word's own lane could put the pattern back before others had seen it, and they waited for
// ever). Rejected without a trial: red.global for the sums (order, and so bits, vary), counters with "last block adds up" (one more
// fence and round trip).
#include "w3_feed.cuh"
#include "w3_finish.cuh"

// What a working warp does: its steps of every row block of the run.
W3_DEVICE void work(const Params& p, const Walk& walk, const SharedMap& map, char* shared, int warp, int lane) {
  const int row_warp = warp % kRowWarps, split_warp = warp / kRowWarps % kSplitWarps, token_warp = warp / (kRowWarps * kSplitWarps);
  const ActivationOrder order(p, walk);
  Maps maps = load_maps(p, min(walk.last_block * kRowWarps + row_warp, p.row_tiles - 1), lane / 4);

  int slot = split_warp / kSlotSteps;
  int units_until_mine = slot;  // slots that go to other groups first
  [[maybe_unused]] int x_slot = 0;
  [[maybe_unused]] u32 parity = 0, x_parity = 0;
  [[maybe_unused]] u32 sums_parity = 0;
  [[maybe_unused]] int turns = 0;                    // steps of the row blocks before
  [[maybe_unused]] int x_ready = 0, x_chunk = 0;     // turns, and chunks, of kept activations that have arrived
  int ahead_block = walk.last_block, ahead_base = walk.begin_of(walk.last_block);  // before sm_90: the next step to ask for
  // this worker's place in slot 0
  const u32 row_at = map.slots + (row_warp + (kBulk ? 0 : token_warp * kRowWarps)) * kSlotRowBytes;
  const int slot_step = split_warp % kSlotSteps;
  const u32 codes_at = row_at + slot_step * 2 * kTileBytes, scales_at = row_at + kSlotCodeBytes;
  auto ask = [&](int to) {
    if (ahead_block >= walk.first_block) {
      if (ahead_base + split_warp < walk.end_of(ahead_block))
        copy_step(p, ahead_block * kRowWarps + row_warp, ahead_base + split_warp, codes_at + to * kSlotBytes,
                  scales_at + to * kSlotBytes + slot_step * 128 * kScaleSets, lane);
      ahead_base += kSplitWarps;
      if (ahead_base >= walk.end_of(ahead_block) && --ahead_block >= walk.first_block) ahead_base = walk.begin_of(ahead_block);
    }
    copy_async_commit();
  };
  if constexpr (!kBulk)
    for (int i = 0; i < kSlots; ++i) ask(i);
  wait_for_predecessors();
  if constexpr (kStagedX == kOwn) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kWorkersStage) stage_chunk(p, walk, order, map, shared, 0, warp, kWarps + 3, lane);
#else
    stage_steps(p, walk, order, 0, order.count, warp, kWarps, lane, shared + (map.x - map.slots),
                reinterpret_cast<float*>(shared + (map.x_scales - map.slots)));
    __syncthreads();
#endif
  }

#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; row_block -= walk.stride) {
    if ((kRowMaps || p.map_tiles) && row_block != walk.last_block)
      maps = load_maps(p, min(row_block * kRowWarps + row_warp, p.row_tiles - 1), lane / 4);
    Accumulators acc;
#pragma unroll
    for (int block = 0; block < 4; ++block)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc.value[block][n][e] = 0;

    const int begin = walk.begin_of(row_block), end = walk.end_of(row_block);
    [[maybe_unused]] const int to_turn = turns - begin, to_place = order.whole ? -order.base : to_turn;
    int base = begin + units_until_mine * kSlotSteps;
#pragma unroll 1
    for (; base < end; base += kSplitWarps) {
      const int step = base + slot_step;
      StagedStep x = {};
      if constexpr (kStagedX == kFromGlobal) {
        x.global = p.staged + static_cast<i64>(step) * kStepXBytes;
        x.global_scales = p.staged_scales + static_cast<i64>(step) * kStepXScales;
      } else if constexpr (kStagedX == kStreamed) {
        const u32 slot_at = map.slots + slot * kSlotBytes;
        x.shared = slot_at + kSlotXAt + slot_step * kStepXBytes;
        x.shared_scales = slot_at + kSlotScalesAt + slot_step * kStepXScales * 4;
      } else {
        const int place = kStagedX > 0 ? x_slot : step + to_place;
        x.shared = map.x + place * kStepXBytes;
        x.shared_scales = map.x_scales + place * kStepXScales * 4;
      }
      // The same in all lanes, and now the compiler knows: what is made of it stays in uniform registers. Here it costs no time.
      if constexpr (kWarpgroups) x.shared = __shfl_sync(0xFFFFFFFFu, x.shared, 0);
#if __CUDA_ARCH__ >= 900
      if constexpr (kBulk) barrier_wait(map.full + 8 * slot, parity);
#endif
      if constexpr (!kBulk) {
        copy_async_wait<kSlots - 1>();
        __syncwarp();
      }
      if (kSlotSteps == 1 || step < end) {
        StepSlot at;
        at.codes = codes_at + slot * kSlotBytes;
        at.both = !kHalfStep || 2 * step + 1 < p.column_tiles;
#pragma unroll
        for (int set = 0; set < kScaleSets; ++set) {
          int place = slot_step * kScaleSets + set;
          if (kBulk && (kScaleSets > 1 || (kSlotSteps > 1 && p.groups != p.steps)))  // a slot holds each group once
            place = group_of_tile(p, 2 * step + set) - quotient(2 * base, p.group_reciprocal);
          at.scales[set] = scales_at + slot * kSlotBytes + place * 128;
        }
#if __CUDA_ARCH__ >= 900
        if constexpr (kStagedX > 0) barrier_wait(map.x_full + 8 * x_slot, x_parity);
        if constexpr (kKeepsX)
          while (x_ready <= step + to_turn && x_ready < order.count) {  // chunk by chunk, once for each worker
            barrier_wait(map.x_full + 8 * x_chunk, 0);
            x_ready = p.first_chunk + x_chunk * p.chunk_steps;
            ++x_chunk;
          }
#endif
        const auto release = [&] {
#if __CUDA_ARCH__ >= 900
          if constexpr (kBulk) {
            fence_async_shared();  // what was read here, the copy engine writes next
            __syncwarp();          // every lane has read
            if (arrives()) barrier_arrive(map.empty + 8 * slot);
          }
#endif
        };
#if __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (kWarpgroups)
          multiply_step_warpgroup(at, maps, x, lane, token_warp, acc, release);
        else
#endif
          multiply_step_warp(at, maps, x, lane, token_warp, acc, release);
      }
#if __CUDA_ARCH__ >= 900
      if (kSlotSteps > 1 && step >= end && kBulk && arrives()) barrier_arrive(map.empty + 8 * slot);
      if constexpr (kStagedX > 0) {
        fence_async_shared();
        __syncwarp();
        if (arrives()) barrier_arrive(map.x_empty + 8 * x_slot);
        if (++x_slot == kStagedX) {
          x_slot = 0;
          x_parity ^= 1;
        }
      }
#endif
      if constexpr (!kBulk) ask(slot);
      slot += kSlotGroups;
      if (slot >= kSlots) {
        slot -= kSlots;
        parity ^= 1;
      }
    }
    units_until_mine = (base - end) / kSlotSteps;  // counted from the first slot of the next row block
    turns += end - begin;
    if constexpr (kCluster > 1) {
#if __CUDA_ARCH__ >= 900
      finish_cluster(p, row_block, acc, map, warp, row_warp, split_warp, token_warp, lane, row_block == walk.last_block,
                     row_block - walk.stride < walk.first_block, sums_parity);
      sums_parity ^= 1;
#endif
    } else {
      finish(p, walk, row_block, acc, map.exchange, warp, row_warp, split_warp, token_warp, lane);
    }
  }
}

extern "C" __global__ void __maxnreg__(kLaunchRegisters) w3_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  // uniform as far as the compiler can tell, so that addresses for the copy engine stay in uniform registers
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const SharedMap map(shared_address(shared), kStagedX > 0 ? kStagedX : kKeepsX ? p.resident_steps : 0);
  const Walk walk(p, blockIdx.x);
#if __CUDA_ARCH__ >= 900
  if constexpr (kBulk) {
    if (warp == 0 && elect_one()) init_barriers(p, map);
    if constexpr (kCluster > 1)
      cluster_barrier();
    else
      __syncthreads();
  }
#endif
  launch_dependents();
#if __CUDA_ARCH__ >= 900
  if constexpr (kFed) {
    if (warp >= kWarps) {
      if constexpr (kTradeRegisters) registers_down<kFeederRegisters>();
      feed(p, walk, map, shared, warp - kWarps, lane);
    } else {
      if constexpr (kTradeRegisters) registers_up<kWorkerRegisters>();
      work(p, walk, map, shared, warp, lane);
    }
    return;
  }
#endif
  work(p, walk, map, shared, warp, lane);
}
