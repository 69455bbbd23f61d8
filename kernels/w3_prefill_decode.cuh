// Codes -> A operands of float16 or bfloat16 matrix instructions, scales included, in the true order of columns.
//
// The eight entries of a map, times the scale of a row and a group, are eight 16-bit numbers: what w3_dequantize.cu would write. They are
// formed once for each row and group, in float32 and rounded once, and become a lookup table in four registers (two byte planes). After
// that a map's dtype and whether rows share it make no difference.
//
// A lane (g, t) of the format has columns 16 t .. 16 t + 15 of its rows. B comes from memory in true order, so lane (g, t) of the
// instruction for columns 16 s .. 16 s + 15 must have columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of these: four lanes, each with the codes of
// one s, exchange them. Selectors are exchanged, not weights, which would be four times as many words.
#pragma once
#include "w3_prefill_params.cuh"

// q / 127, correctly rounded, as in w3_dequantize.cu.
W3_DEVICE float over_127(int q) {
  constexpr float kInverse = 1.0f / 127.0f;
  const float value = static_cast<float>(q), estimate = value * kInverse;
  return fmaf(fmaf(-127.0f, estimate, value), kInverse, estimate);
}

// What the entries of a map mean.
struct MapValues {
  float value[8];

  W3_DEVICE MapValues(const void* qmap, i64 index) {
    if constexpr (kInt8Map) {
      const uint2 entries = __ldg(reinterpret_cast<const uint2*>(qmap) + index);
#pragma unroll
      for (int e = 0; e < 8; ++e) value[e] = over_127(static_cast<int>((e < 4 ? entries.x : entries.y) << (24 - 8 * (e % 4))) >> 24);
    } else {
      const uint4 entries = __ldg(reinterpret_cast<const uint4*>(qmap) + index);
      const u32 words[4] = {entries.x, entries.y, entries.z, entries.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) value[e] = half_to_float(words[e / 2] >> (16 * (e % 2)) & 0xFFFFu);
    }
  }
};

// The weights of a row and group: 16-bit numbers as byte planes (w3_words.cuh, Map<false>).
W3_DEVICE Map<false> scaled_map(const MapValues& map, float scale) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = map.value[2 * i] * scale, second = map.value[2 * i + 1] * scale;
    pairs[i] = kBf16 ? floats_to_bfloat2(first, second) : floats_to_half2(first, second);
  }
  Map<false> out;
  out.table[0] = permute(pairs[0], pairs[1], 0x6420);
  out.table[1] = permute(pairs[2], pairs[3], 0x6420);
  out.table[2] = permute(pairs[0], pairs[1], 0x7531);
  out.table[3] = permute(pairs[2], pairs[3], 0x7531);
  return out;
}

// Opaque, so that the compiler keeps the value and does not work it out again at every use.
W3_DEVICE u32 kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

W3_DEVICE u32 load_shared_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Where a lane finds its words of a 16-row block, from the address of the row tile's codes and scales on.
struct BlockPlace {
  u32 word[kDense ? 3 : 1], scales;

  // `block` is the same for the whole warp.
  W3_DEVICE BlockPlace(int block, int lane) {
#pragma unroll
    for (int j = 0; j < (kDense ? 3 : 1); ++j) {
      const int q = kDense ? 3 * block + j : 4 * block;
      word[j] = kept(q / 4 * 512 + lane * 16 + q % 4 * 4);
    }
    scales = kept(kTileBytes + lane / 4 * 16 + block * 4);
  }
};

// The lane's code words of a 16-row block, and the scales of its two rows, as stored.
struct RawBlock {
  u32 word[kDense ? 3 : 4];
  u32 scales;  // row g in the low half, row g + 8 in the high half

  W3_DEVICE void load(u32 row_tile, const BlockPlace& at) {
    if constexpr (kDense) {
#pragma unroll
      for (int j = 0; j < 3; ++j) word[j] = load_shared_word(row_tile + at.word[j]);
    } else {
      const Vec4 v = load_shared(row_tile + at.word[0]);
      word[0] = v.x;
      word[1] = v.y;
      word[2] = v.z;
      word[3] = v.w;
    }
    scales = load_shared_word(row_tile + at.scales);
  }

  W3_DEVICE float scale(int half) const { return half_to_float(scales >> (16 * half) & 0xFFFFu); }

  // The four selectors of columns 16 t .. 16 t + 15, four columns of both rows each.
  W3_DEVICE void selectors(u32 (&out)[4]) const {
    u32 words[kDense ? 12 : 16];
#pragma unroll
    for (int j = 0; j < (kDense ? 3 : 4); ++j) words[j] = word[j];
    block_selectors<kDense>(words, 0, out);
  }
};

// What a lane does in the exchange, by its t = 2 a + b.
struct Exchange {
  bool a, b;
  u32 mine, theirs;  // permutes: of two words the bytes b, b + 2 of each, for this b and for the other

  W3_DEVICE explicit Exchange(int t)
      : a(t & 2), b(t & 1), mine(kept(0x6240u + (t & 1) * 0x1111u)), theirs(kept(0x7351u - (t & 1) * 0x1111u)) {}

  // in[j]: columns 16 t + 4 j .. 16 t + 4 j + 3, row g in the low half, row g + 8 in the high half.
  // out[s]: columns 16 s + 2 t, + 1, + 8, + 9, in the same halves.
  W3_DEVICE void operator()(const u32 (&in)[4], u32 (&out)[4]) const {
    u32 word[2][2];  // [c][h]: word 2 h + a of lane (c, b), which are its columns 8 h + 4 a .. 8 h + 4 a + 3
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 got = __shfl_xor_sync(0xFFFFFFFFu, a ? in[2 * h] : in[2 * h + 1], 2);
      word[0][h] = a ? got : in[2 * h];
      word[1][h] = a ? in[2 * h + 1] : got;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const u32 keep = permute(word[c][0], word[c][1], mine);
      const u32 got = __shfl_xor_sync(0xFFFFFFFFu, permute(word[c][0], word[c][1], theirs), 1);
      out[2 * c] = b ? got : keep;
      out[2 * c + 1] = b ? keep : got;
    }
  }
};

// The A operand of 16 columns.
W3_DEVICE void operand(u32 selector, const Map<false>& upper, const Map<false>& lower, u32 (&a)[4]) {
  lookup(upper, selector, a[0], a[2]);
  lookup(lower, selector >> 16, a[1], a[3]);
}
