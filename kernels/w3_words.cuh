// Code words -> tensor-core fragments of the weight matrix (SPEC.md, section 1, "Tile order").
//
// A lane (g, t) owns rows g and g + 8 of each 16-row block of a 64x64 tile, and 16 consecutive columns of it: four words of
// eight codes a block. The low half of a word holds four codes of row g, the high half four of row g + 8. Each half, bit 3 of
// every nibble cleared, is a `prmt` selector: one instruction looks up four weights, and what it writes is an operand
// register of the matrix instruction. There is no index arithmetic and no table in memory.
#pragma once
#include "ptx.cuh"

#ifdef W3_DENSE
constexpr bool kDense = W3_DENSE;
constexpr int kVectors = kDense ? 3 : 4;       // 16-byte vectors of a lane in a tile
constexpr int kTileBytes = kVectors * 32 * 16;  // 1536 or 2048
constexpr bool kInt8Map = W3_INT8_MAP;
constexpr bool kRowMaps = W3_ROW_MAPS;  // a map for each row instead of one for the row tile
#endif

constexpr u32 kLowBits = 0x77777777u;

// The four selectors of a 16-row block from the lane's words of the tile.
template <bool dense>
W3_DEVICE void block_selectors(const u32 (&words)[dense ? 12 : 16], int block, u32 (&selector)[4]) {
  if constexpr (dense) {
    const u32 w0 = words[3 * block], w1 = words[3 * block + 1], w2 = words[3 * block + 2];
    selector[0] = w0 & kLowBits;
    selector[1] = w1 & kLowBits;
    selector[2] = w2 & kLowBits;
    // the fourth word travels in the spare bits: bit b of its codes is bit 3 of word b
    selector[3] = masked_or<0x44444444u>(w2 >> 1, masked_or<0x22222222u>(w1 >> 2, w0 >> 3 & 0x11111111u));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) selector[j] = words[4 * block + j];  // bit 3 is 0 in this layout
  }
}

// A map of eight entries as lookup tables. int8: the entries, 0..3 and 4..7. float16: their low bytes, then high bytes.
template <bool int8_map>
struct Map {
  u32 table[int8_map ? 2 : 4];
};

template <bool int8_map>
W3_DEVICE Map<int8_map> load_map(const void* qmap, i64 index) {
  Map<int8_map> map;
  if constexpr (int8_map) {
    const uint2 entries = __ldg(reinterpret_cast<const uint2*>(qmap) + index);
    map.table[0] = entries.x;
    map.table[1] = entries.y;
  } else {
    const uint4 entries = __ldg(reinterpret_cast<const uint4*>(qmap) + index);
    map.table[0] = permute(entries.x, entries.y, 0x6420);
    map.table[1] = permute(entries.z, entries.w, 0x6420);
    map.table[2] = permute(entries.x, entries.y, 0x7531);
    map.table[3] = permute(entries.z, entries.w, 0x7531);
  }
  return map;
}

// Four int8 weights of a row.
W3_DEVICE u32 lookup(const Map<true>& map, u32 selector) {
  return permute(map.table[0], map.table[1], selector);
}

// Four float16 weights of a row: two byte planes, then interleaved.
W3_DEVICE void lookup(const Map<false>& map, u32 selector, u32& first, u32& second) {
  const u32 low = permute(map.table[0], map.table[1], selector);
  const u32 high = permute(map.table[2], map.table[3], selector);
  first = permute(low, high, 0x5140);
  second = permute(low, high, 0x7362);
}

// A operands of one 16-row block of one tile. int8: two k = 32 fragments of words (0, 1) and (2, 3). float16: four k = 16
// fragments, one a word. `upper` is the map of row g, `lower` that of row g + 8.
template <bool int8_map>
struct BlockFragments {
  u32 a[int8_map ? 2 : 4][4];
};

template <bool int8_map>
W3_DEVICE void fragments(const u32 (&selector)[4], const Map<int8_map>& upper, const Map<int8_map>& lower,
                         BlockFragments<int8_map>& out) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (int8_map) {
      out.a[j / 2][2 * (j % 2)] = lookup(upper, selector[j]);
      out.a[j / 2][2 * (j % 2) + 1] = lookup(lower, selector[j] >> 16);
    } else {
      lookup(upper, selector[j], out.a[j][0], out.a[j][2]);
      lookup(lower, selector[j] >> 16, out.a[j][1], out.a[j][3]);
    }
  }
}
