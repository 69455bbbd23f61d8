// y = SiLU(x Wg^T) * (x Wu^T), or y = x W^T, for few tokens; weights in E4M3 with a scale for each block of 128 x 128. One persistent
// thread block on each multiprocessor; weights are read once and stay in 8 bits until they are in registers.
//
// Shapes: x [tokens, columns] float16 or bfloat16, weights [rows, columns] (two matrices, or one), scales [ceil(rows / 128),
// ceil(columns / 128)] float32, y [tokens, rows] of x's dtype. 16 divides the columns; rows may be any number.
//
// Weights are the A operand of float16 matrix instructions, tokens the N side (8 a tile). E4M3 becomes float16 exactly, two numbers in
// one instruction. The float32 sums of 128 columns are multiplied by the block's scale and added up in float32; SiLU and product follow in
// float32, and the result is rounded once.
//
// A row block is kHalfRows rows of gate and the same rows of up (of one matrix: twice as many neighbours); a unit is a row block's next
// kPiece columns. The units, columns running fastest, are cut into equal runs, one for each thread block, and a run is walked from its last
// row block to its first: the partition, the partial sums that carry their own flag, and why nobody waits for ever are those of
// w3_decode.cu.
//
// Two extra warps feed a ring of slots, a unit and its activations each, with the copy engine (gateup_feed.cuh). Working warp (r, s)
// takes a share of the rows, and of the columns every kSplitWarps-th 128 (gateup_multiply.cuh). bfloat16 activations become float16 in
// shared memory, once for all warps, by one or two warps more (gateup_convert.cuh).
//
// A launch may begin while its predecessor in the stream ends: weights and scales are asked for at once, x, the workspace and y are
// touched after wait_for_predecessors() only.
#include "gateup_convert.cuh"
#include "gateup_feed.cuh"
#include "gateup_finish.cuh"

#if __CUDA_ARCH__ >= 900
// Scales of the weights of a warp's parts of a piece, for both halves.
struct RowScales {
  float value[kMyParts][2];

  W3_DEVICE void load(const float* const (&rows)[2], int piece, int split_warp, const Params& p) {
#pragma unroll
    for (int m = 0; m < kMyParts; ++m) {
      const int block = min(piece * kParts + split_warp + m * kSplitWarps, p.scale_columns - 1);
      value[m][0] = load_constant(rows[0] + block);
      value[m][1] = load_constant(rows[1] + block);
    }
  }
};

// What a working warp does: its share of every unit of the run.
W3_DEVICE void work(const Params& p, const Walk& walk, const SharedMap& map, int warp, int lane) {
  const int row_warp = warp % kRowWarps, split_warp = warp / kRowWarps;
  const int warp_row = row_warp * kTiles * 8;
  const u32 my_row = (warp_row + tile_row(lane / 4)) * kBlock;
  u32 my_x[kTokenTiles];  // tokens past the last repeat it
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) my_x[n] = min(8 * n + lane / 4, p.tokens - 1) * kTokenPitch + lane % 4 * 32;
  int slot = 0;
  u32 parity = 0;
  wait_for_predecessors();
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block) {
    Accumulators acc;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc.value[tile][n][e] = 0;
    // rows beyond the matrix take the scales of the last ones; what comes of them is not written
    const float* const rows[2] = {p.first_scales + min(first_row(row_block) + warp_row, p.rows - 1) / kBlock * p.scale_columns,
                                  p.second_scales + min(second_row(row_block) + warp_row, p.rows - 1) / kBlock * p.scale_columns};
    const int end = walk.end_of(row_block);
    RowScales scales;
    scales.load(rows, walk.begin_of(row_block), split_warp, p);
#pragma unroll 1
    for (int piece = walk.begin_of(row_block); piece < end; ++piece) {
      RowScales next;  // a piece ahead: they come from far
      next.load(rows, piece + 1, split_warp, p);
      barrier_wait(map.full + 8 * slot, parity);
#pragma unroll
      for (int m = 0; m < kMyParts; ++m) {
        const int part = split_warp + m * kSplitWarps, column = piece * kPiece + part * kBlock;
        if (column >= p.columns) continue;
        u32 x[kTokenTiles];
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) x[n] = map.x + slot * map.x_place + part * 2 * kBlock + my_x[n];
        const Scales products(scales.value[m], map.x_scales + 4 * (slot * kParts + part) * kScaleTokens, lane % 4);
        multiply_part(map.slots + slot * kSlotBytes + part * 2 * kHalfBytes + my_row, x, products, p.columns - column, lane, acc);
      }
      fence_async_shared();  // what was read here, the copy engine writes next
      __syncwarp();          // every lane has read
      if (arrives()) barrier_arrive(map.empty + 8 * slot);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
      scales = next;
    }
    finish(p, walk, row_block, acc, map.exchange, warp, row_warp, split_warp, lane);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1) gateup_decode(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) char shared[];
  // uniform as far as the compiler can tell, so that addresses for the copy engine stay in uniform registers
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const SharedMap map(shared_address(shared), p);
  const Walk walk(p, blockIdx.x);
  if (warp == kWarps) init_barriers(map);
  __syncthreads();
  launch_dependents();
  if (warp < kWarps)
    work(p, walk, map, warp, lane);
  else if (warp < kWarps + 2)
    feed(p, walk, map, warp - kWarps);
  else if constexpr (kBf16)
    convert(p, walk, map, warp - kWarps - 2, lane);
#endif
}
