// What follows the last piece of a row block: sums over warps, then over thread blocks, then SiLU and product, rounding, output.
#pragma once
#include "gateup_multiply.cuh"

W3_DEVICE u32 not_empty(float value) {
  const u32 bits = __float_as_uint(value);
  return bits == kEmpty ? 0x7FFFFFFFu : bits;
}

W3_DEVICE u16 rounded(float value) {
  return static_cast<u16>(kBf16 ? floats_to_bfloat2(value, 0) : floats_to_half2(value, 0));
}

// gate / (1 + e^-gate) * up, all in float32, the quotient by an estimate of the reciprocal that is good to its last bit but one.
W3_DEVICE float silu_product(float gate, float up) {
  return gate * reciprocal_estimate(1.0f + __expf(-gate)) * up;
}

// Where a lane's outputs stand: its row of the warp's first tile, and its tokens 2 t and 2 t + 1 of the first token tile.
struct Output {
  u16* y;
  int row0, row1, token;

  W3_DEVICE Output(const Params& p, int row_block, int row_warp, int lane) {
    const int row = row_warp * kTiles * 8 + tile_row(lane / 4);
    row0 = first_row(row_block) + row;
    row1 = second_row(row_block) + row;
    token = 2 * (lane % 4);
    y = p.y + static_cast<i64>(token) * p.rows;
  }
  // One quad of fragment elements: both halves of a row, two tokens.
  W3_DEVICE void store(const Params& p, int quad, const float (&sum)[4]) const {
    const int down = quad / kTokenTiles * 8, right = 8 * (quad % kTokenTiles);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      u16* const at = y + static_cast<i64>(right + e) * p.rows + down;
      const bool there = token + right + e < p.tokens;
      if constexpr (kPaired) {
        const u16 value = rounded(silu_product(sum[e], sum[2 + e]));
        if (there && row0 + down < p.rows) at[row0] = value;
      } else {
        const u16 first = rounded(sum[e]), second = rounded(sum[2 + e]);
        if (there && row0 + down < p.rows) at[row0] = first;
        if (there && row1 + down < p.rows) at[row1] = second;
      }
    }
  }
};

// The sums of a warp's quads [first, first + count) over the thread blocks that share the row block, or their hand-over to its owner.
//   mine: partial sums of this thread block, of the warp's first quad; a quad is 512 bytes, the warps' columns take quads in turn
template <int first, int count>
W3_DEVICE void settle(const Params& p, const Walk& walk, int row_block, int earliest, char* mine, int split_warp, const Output& out,
                      float (&sum)[count][4]) {
  constexpr i64 kOfBlock = static_cast<i64>(kRowWarps) * kQuads * 512;
  auto quad_of = [&](int m) { return split_warp + (first + m) * kSplitWarps; };
  // tokens that nobody asked for are not exchanged
  auto wanted = [&](int m) { return quad_of(m) < kQuads && 8 * (quad_of(m) % kTokenTiles) < p.tokens; };
  if (walk.end_of(row_block) < p.pieces) {  // another block owns the end of these rows
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (wanted(m))
        store_relaxed(mine + quad_of(m) * 512, {not_empty(sum[m][0]), not_empty(sum[m][1]), not_empty(sum[m][2]), not_empty(sum[m][3])});
    return;
  }
  constexpr int kInFlight = 8;                                             // loads of a lane
  constexpr int kTogether = count >= kInFlight ? 1 : kInFlight / count;  // blocks whose sums are asked for at once
  const int others = static_cast<int>(blockIdx.x) - earliest;
  char* theirs = mine - others * kOfBlock;
#pragma unroll 1
  for (int begin = 0; begin < others; begin += kTogether) {
    Vec4 got[kTogether][count];
    bool all;
    do {  // repeated until the writers are there
      all = true;
#pragma unroll
      for (int b = 0; b < kTogether; ++b)
#pragma unroll
        for (int m = 0; m < count; ++m)
          if (wanted(m) && begin + b < others) got[b][m] = load_relaxed(theirs + b * kOfBlock + quad_of(m) * 512);
#pragma unroll
      for (int b = 0; b < kTogether; ++b)
#pragma unroll
        for (int m = 0; m < count; ++m)
          if (wanted(m) && begin + b < others)
            all = all && got[b][m].x != kEmpty && got[b][m].y != kEmpty && got[b][m].z != kEmpty && got[b][m].w != kEmpty;
    } while (!all);
#pragma unroll
    for (int b = 0; b < kTogether; ++b)  // in order of block
#pragma unroll
      for (int m = 0; m < count; ++m)
        if (wanted(m) && begin + b < others) {
          sum[m][0] += __uint_as_float(got[b][m].x);
          sum[m][1] += __uint_as_float(got[b][m].y);
          sum[m][2] += __uint_as_float(got[b][m].z);
          sum[m][3] += __uint_as_float(got[b][m].w);
          store_relaxed(theirs + b * kOfBlock + quad_of(m) * 512, {kEmpty, kEmpty, kEmpty, kEmpty});
        }
    theirs += kTogether * kOfBlock;
  }
#pragma unroll
  for (int m = 0; m < count; ++m)
    if (wanted(m)) out.store(p, quad_of(m), sum[m]);
}

// The sums of quads [first, kMine) of a warp, a few at a time, so that they find registers.
template <int first, int kMine>
W3_DEVICE void settle_from(const Params& p, const Walk& walk, int row_block, int earliest, char* mine, u32 exchange, int row_warp,
                           int split_warp, int lane, const Output& out, const Accumulators& acc) {
  constexpr int count = kMine - first < 4 ? kMine - first : 4;
  float sum[count][4];
#pragma unroll
  for (int m = 0; m < count; ++m) {
    if constexpr (kSplitWarps == 1) {
      const int q = first + m;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] = acc.value[q / kTokenTiles][q % kTokenTiles][e];
    } else {
      const int q = split_warp + (first + m) * kSplitWarps;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] = 0;
      if (q < kQuads)
#pragma unroll
        for (int k = 0; k < kSplitWarps; ++k) {  // in order of warp
          const Float4 v = load_shared_float4(exchange + (((k * kRowWarps + row_warp) * kQuads + q) * 32 + lane) * 16);
          sum[m][0] += v.x;
          sum[m][1] += v.y;
          sum[m][2] += v.z;
          sum[m][3] += v.w;
        }
    }
  }
  settle<first, count>(p, walk, row_block, earliest, mine, split_warp, out, sum);
  if constexpr (first + count < kMine)
    settle_from<first + count, kMine>(p, walk, row_block, earliest, mine, exchange, row_warp, split_warp, lane, out, acc);
}

W3_DEVICE void finish(const Params& p, const Walk& walk, int row_block, const Accumulators& acc, u32 exchange, int warp, int row_warp,
                      int split_warp, int lane) {
  // addresses are worked out here and not kept in registers from row block to row block
  asm volatile("" : "+r"(lane), "+r"(row_warp), "+r"(split_warp));
  // warp s of a row warp's columns adds up quads s, s + kSplitWarps, ... of all its warps
  constexpr int kMine = (kQuads + kSplitWarps - 1) / kSplitWarps;
  if constexpr (kSplitWarps > 1) {
    named_barrier(1 + row_warp, 32 * kSplitWarps);  // the last row block's sums have been read
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float* v = acc.value[q / kTokenTiles][q % kTokenTiles];
      store_shared_floats(exchange + ((warp * kQuads + q) * 32 + lane) * 16, {v[0], v[1], v[2], v[3]});
    }
    named_barrier(1 + row_warp, 32 * kSplitWarps);
  }
  // the first thread block that has columns of these rows
  int earliest = blockIdx.x;
  while (Walk::start_of(p, earliest) > row_block * p.pieces) --earliest;
  char* const mine = p.partials + static_cast<i64>(blockIdx.x * kRowWarps + row_warp) * kQuads * 512 + lane * 16;
  const Output out(p, row_block, row_warp, lane);
  settle_from<0, kMine>(p, walk, row_block, earliest, mine, exchange, row_warp, split_warp, lane, out, acc);
}
