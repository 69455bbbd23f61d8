// bfloat16 activations of a slot -> float16 in their place, and a scale for each token and 128 columns. Warps that do nothing else
// convert them once for all working warps, a slot or more ahead of these.
//
// x becomes x times the power of two that brings the largest of the 128 into [2^15, 2^16): no overflow, and exact for everything
// within 2^-32 of the largest. The scale, its inverse, multiplies the products. A NaN or an infinity makes the scale NaN.
#pragma once
#include "gateup_walk.cuh"

#if __CUDA_ARCH__ >= 900
// Eight numbers of 128, by a half warp; returns the scale, the same in its 16 lanes. All lanes of the warp.
W3_DEVICE float convert_eight(Vec4& v) {
  u32 word[4] = {v.x, v.y, v.z, v.w};
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = larger_halves<true>(largest, word[i] & 0x7FFF7FFFu);
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2)
    largest = larger_halves<true>(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  const u32 peak = max(largest & 0xFFFFu, largest >> 16);  // magnitudes order like their bits, NaN above all
  const u32 exponent = max(peak >> 7, 16u);                // below that a scale would not be a normal number
  const float factor = __uint_as_float((269u - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    word[i] = floats_to_half2(__uint_as_float(word[i] << 16) * factor, __uint_as_float(word[i] & 0xFFFF0000u) * factor);
  v = {word[0], word[1], word[2], word[3]};
  return __uint_as_float(peak < 0x7F80u ? (exponent - 15u) << 23 : 0x7FFFFFFFu);
}

// What converting warp `converter` does: of every slot, two tokens at a time.
W3_DEVICE void convert(const Params& p, const Walk& walk, const SharedMap& map, int converter, int lane) {
  const int part16 = lane % 16;
  int slot = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int row_block = walk.last_block; row_block >= walk.first_block; --row_block)
#pragma unroll 1
    for (int piece = walk.begin_of(row_block); piece < walk.end_of(row_block); ++piece) {
      const int columns = p.columns - piece * kPiece;
      barrier_wait(map.raw + 8 * slot, parity);
#pragma unroll 1
      for (int first = 2 * converter; first < p.tokens; first += 2 * kConverters) {
        const int token = first + lane / 16;
        const u32 at = map.x + slot * map.x_place + token * kTokenPitch + 16 * part16;
        Vec4 value[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          value[part] = {0, 0, 0, 0};
          if (token < p.tokens && part * kBlock + 8 * part16 < columns) value[part] = load_shared(at + part * 2 * kBlock);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float scale = convert_eight(value[part]);
          if (token < p.tokens && part * kBlock + 8 * part16 < columns) {
            store_shared(at + part * 2 * kBlock, value[part]);
            if (part16 == 0) store_shared_float(map.x_scales + 4 * ((slot * kParts + part) * kScaleTokens + token), scale);
          }
        }
      }
      fence_async_shared();  // the copy engine writes here next
      __syncwarp();
      if (arrives()) barrier_arrive(map.ready + 8 * slot);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
}
#endif
