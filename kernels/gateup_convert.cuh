// bfloat16 activations of a slot -> float16 in their place, and a scale for each token and 128 columns. Warps that do nothing else
// convert them once for all working warps, a slot or more ahead of these.
//
// x becomes x times the power of two that brings the largest of the 128 into [2^15, 2^16): no overflow, and exact for everything
// within 2^-32 of the largest. The scale, its inverse, multiplies the products. A NaN or an infinity makes the scale NaN.
//
// A warp takes 8 tokens of 128 columns at once, four lanes a token: lane l has token l % 8 and, of its 16 chunks of 8 columns, every
// fourth from l / 8 on. Eight lanes that are served together read the same columns of eight tokens, from different banks. Exchanges between
// lanes are what takes the time, and two are all that four lanes need for their largest; sixteen lanes a token need four.
#pragma once
#include "gateup_walk.cuh"

#if __CUDA_ARCH__ >= 900
// A lane's share of 128 columns of a token.
struct Columns {
  Vec4 chunk[4];
};

// The largest magnitudes of the lane's even and odd columns, with some sign.
W3_DEVICE u32 largest_of(const Columns& x) {
  u32 of_chunk[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    of_chunk[i] = larger_magnitudes(larger_magnitudes(x.chunk[i].x, x.chunk[i].y), larger_magnitudes(x.chunk[i].z, x.chunk[i].w));
  return larger_magnitudes(larger_magnitudes(of_chunk[0], of_chunk[1]), larger_magnitudes(of_chunk[2], of_chunk[3]));
}

// From the largest of 128 columns: what x is multiplied by, in bfloat16 twice, and what products are.
struct Powers {
  u32 factors;
  float scale;

  W3_DEVICE explicit Powers(u32 largest) {
    const u32 peak = max(largest & 0x7FFFu, largest >> 16 & 0x7FFFu);  // magnitudes order like their bits, NaN above all
    const u32 exponent = max(peak >> 7, 16u);                          // below that a scale would not be a normal number
    factors = (269u - exponent) * 0x800080u;
    scale = __uint_as_float(peak < 0x7F80u ? (exponent - 15u) << 23 : 0x7FFFFFFFu);
  }
};

// Two bfloat16 -> float16. The product is exact, unless it is too small for float16 by far.
W3_DEVICE u32 scaled(u32 word, u32 factors) {
  const u32 product = multiply_bfloat2(word, factors);
  return floats_to_half2(__uint_as_float(product << 16), __uint_as_float(product & 0xFFFF0000u));
}

W3_DEVICE void scale_columns(Columns& x, u32 factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Vec4 v = x.chunk[i];
    x.chunk[i] = {scaled(v.x, factors), scaled(v.y, factors), scaled(v.z, factors), scaled(v.w, factors)};
  }
}

// What converting warp `converter` does: of every slot, its share of the (token tile, 128 columns), all of it at once.
W3_DEVICE void convert(const Params& p, const Walk& walk, const SharedMap& map, int converter, int lane) {
  constexpr int kSharing = kBf16 ? kConverters : 1, kShare = kTokenTiles * kParts / kSharing;
  int column[kShare];          // the first of 128, in a slot
  u32 at[kShare], to[kShare];  // of the lane's first chunk, and of the scale, in the first slot
  bool there[kShare];          // whether the lane's token is
#pragma unroll
  for (int m = 0; m < kShare; ++m) {
    const int part = (converter + m * kSharing) % kParts, token = (converter + m * kSharing) / kParts * 8 + lane % 8;
    column[m] = part * kBlock;
    at[m] = map.x + token * kTokenPitch + 2 * column[m] + 16 * (lane / 8);
    to[m] = map.x_scales + 4 * (part * kScaleTokens + token);
    there[m] = token < p.tokens;
  }
  int slot = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block)
#pragma unroll 1
    for (int piece = walk.begin_of(row_block); piece < walk.end_of(row_block); ++piece) {
      const int columns = p.columns - piece * kPiece;
      // of the lane's chunk i; 128 columns are there or not, unless 128 does not divide the columns
      auto has = [&](int m, int i) { return there[m] && column[m] + (kPartial ? 8 * (lane / 8) + 32 * i : 0) < columns; };
      const u32 offset = slot * map.x_place;
      Columns x[kShare] = {};
      barrier_wait(map.raw + 8 * slot, parity);
#pragma unroll
      for (int m = 0; m < kShare; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (has(m, i)) x[m].chunk[i] = load_shared(at[m] + offset + 64 * i);
      u32 largest[kShare];
#pragma unroll
      for (int m = 0; m < kShare; ++m) largest[m] = largest_of(x[m]);
#pragma unroll
      for (int distance = 8; distance < 32; distance *= 2)
#pragma unroll
        for (int m = 0; m < kShare; ++m) largest[m] = larger_magnitudes(largest[m], __shfl_xor_sync(0xFFFFFFFFu, largest[m], distance));
#pragma unroll
      for (int m = 0; m < kShare; ++m) {
        const Powers powers(largest[m]);
        scale_columns(x[m], powers.factors);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (has(m, i)) store_shared(at[m] + offset + 64 * i, x[m].chunk[i]);
        if (lane < 8) store_shared_float(to[m] + slot * (4 * kParts * kScaleTokens), powers.scale);
      }
      fence_async_shared();  // the copy engine writes here next
      __syncwarp();
      if (arrives()) barrier_arrive(map.full + 8 * slot);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
}
#endif
