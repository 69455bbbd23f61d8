// One step of one row tile: codes and staged activations -> sums.
#pragma once
#include "w3_decode_params.cuh"
#include "wgmma.cuh"

struct Accumulators {
  float value[4][kTokenTiles][4];  // [16-row block, token tile, fragment element]
};

// The B operands of one token tile for a step, and its activation scales.
struct TokenOperands {
  Vec4 part[2][2];  // [tile, part]
  float scale[2];   // tokens 2 t and 2 t + 1
  float offset[2];  // -kInteger * scale
};

W3_DEVICE u32 component(const Vec4& v, int index) {
  return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

template <int first_tile, int last_tile>
W3_DEVICE void multiply_block(const BlockFragments<kInt8Map> (&a)[2], const TokenOperands& b, const float (&row_scale)[2],
                              float (&acc)[4]) {
  if constexpr (kInt8Map) {
    // integer sums of a step stay below 2^22, so they can grow inside the mantissa of kInteger and need no conversion
    if constexpr (kBeside) {
      u32 sum[4] = {kIntegerBits, kIntegerBits, kIntegerBits, kIntegerBits};
#pragma unroll
      for (int tile = first_tile; tile < last_tile; ++tile)
#pragma unroll
        for (int s = 0; s < 2; ++s)
          mma_s8(sum, a[tile].a[s], component(b.part[tile][0], 2 * s), component(b.part[tile][0], 2 * s + 1));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        acc[e] = fmaf(fmaf(__uint_as_float(sum[e]), b.scale[e % 2], b.offset[e % 2]), row_scale[e / 2], acc[e]);
      return;
    }
    u32 high[4] = {kIntegerBits, kIntegerBits, kIntegerBits, kIntegerBits};
    u32 low[4] = {kIntegerBits, kIntegerBits, kIntegerBits, kIntegerBits};
#pragma unroll
    for (int tile = first_tile; tile < last_tile; ++tile)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        mma_s8(high, a[tile].a[s], component(b.part[tile][0], 2 * s), component(b.part[tile][0], 2 * s + 1));
        mma_s8(low, a[tile].a[s], component(b.part[tile][1], 2 * s), component(b.part[tile][1], 2 * s + 1));
      }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // four operations a sum: the low plane's kInteger is taken off together with the activation scale
      const float sum = fmaf(__uint_as_float(high[e]) - kInteger, 256.0f, __uint_as_float(low[e]));
      acc[e] = fmaf(fmaf(sum, b.scale[e % 2], b.offset[e % 2]), row_scale[e / 2], acc[e]);
    }
  } else {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int tile = first_tile; tile < last_tile; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma_f16(sum, a[tile].a[j], component(b.part[tile][j / 2], 2 * (j % 2)), component(b.part[tile][j / 2], 2 * (j % 2) + 1));
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] = fmaf(kScaledX ? sum[e] * b.scale[e % 2] : sum[e], row_scale[e / 2], acc[e]);
  }
}

// The eight scales of this lane: rows g + 8 * half + 16 * block at index 2 * block + half.
struct RowScales {
  float value[kScaleSets][8];
};

// `at` are the addresses of the groups' scales.
W3_DEVICE RowScales load_row_scales(const u32 (&at)[kScaleSets], int g) {
  RowScales out;
#pragma unroll
  for (int set = 0; set < kScaleSets; ++set) {
    const Vec4 v = load_shared(at[set] + 16 * g);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.value[set][2 * i] = half_to_float(words[i] & 0xFFFFu);
      out.value[set][2 * i + 1] = half_to_float(words[i] >> 16);
    }
  }
  return out;
}

// Where a worker finds its step's codes and scales, and whether the step has its second tile.
struct StepSlot {
  u32 codes, scales[kScaleSets];
  bool both;
};

struct Maps {
  Map<kInt8Map> map[kRowMaps ? 8 : 1];  // [2 * block + half], or one
};

W3_DEVICE Maps load_maps(const Params& p, int row_tile, int g) {
  Maps maps;
  if constexpr (kRowMaps) {
#pragma unroll
    for (int i = 0; i < 8; ++i) maps.map[i] = load_map<kInt8Map>(p.qmap, row_tile * 64ll + 8 * i + g);
  } else {
    maps.map[0] = load_map<kInt8Map>(p.qmap, p.map_tiles ? row_tile / p.map_tiles : 0);
  }
  return maps;
}

// Staged activations of a step: in shared memory or, where they are read as they are needed, in global memory.
struct StagedStep {
  u32 shared, shared_scales;
  const char* global;
  const float* global_scales;

  W3_DEVICE Vec4 operands(int offset) const { return kStagedX != kFromGlobal ? load_shared(shared + offset) : load_global(global + offset); }
  W3_DEVICE float2 scales(int token) const {
    return kStagedX != kFromGlobal ? load_shared_floats(shared_scales + 4 * token) : *reinterpret_cast<const float2*>(global_scales + token);
  }
};

// The lane's code words of a step.
struct StepWords {
  u32 word[2][4 * kVectors];

  W3_DEVICE void load(u32 slot, int lane, int vector) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const Vec4 v = load_shared(slot + tile * kTileBytes + (vector * 32 + lane) * 16);
      word[tile][4 * vector] = v.x;
      word[tile][4 * vector + 1] = v.y;
      word[tile][4 * vector + 2] = v.z;
      word[tile][4 * vector + 3] = v.w;
    }
  }
  // Whatever lies in place of a tile past the matrix may be no selector: bit 3 set could make a NaN, which zeros do not hide.
  W3_DEVICE void clear_second(int vector) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[1][4 * vector + i] = 0;
  }
};

#if __CUDA_ARCH_FEAT_SM90_ALL
// The sums of a warpgroup instruction: with an int8 map high and low plane side by side.
template <bool int8_map>
struct WarpgroupSums {
  static constexpr int kRegisters = (int8_map && !kBeside ? 8 : 4) * kTokenTiles;
  u32 integer[int8_map ? kRegisters : 1];
  float real[int8_map ? 1 : kRegisters];

  // Issues the products of tiles [first, last) of a 16-row block.
  template <int first, int last>
  W3_DEVICE void multiply(const BlockFragments<int8_map> (&a)[2], u64 operands) {
    constexpr int kSteps = int8_map ? 2 : 4;
    constexpr int kStepBytes = kStepXBytes / (2 * kSteps);
#pragma unroll
    for (int tile = first; tile < last; ++tile)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const u64 b = operands + static_cast<u64>((tile * kSteps + s) * kStepBytes >> 4);
        if constexpr (int8_map) {
          if (tile == first && s == 0)
            wgmma_s8<0>(integer, a[tile].a[s], b);
          else
            wgmma_s8<1>(integer, a[tile].a[s], b);
        } else {
          if (tile == first && s == 0)
            wgmma_f16<0>(real, a[tile].a[s], b);
          else
            wgmma_f16<1>(real, a[tile].a[s], b);
        }
      }
  }

  // After the wait: nothing that uses the sums may move in front of it.
  W3_DEVICE void settle() {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if constexpr (int8_map)
        asm volatile("" : "+r"(integer[i])::"memory");
      else
        asm volatile("" : "+f"(real[i])::"memory");
    }
  }

  W3_DEVICE void add_to(float (&acc)[kTokenTiles][4], const float (&row_scale)[2], const float (&x_scale)[kTokenTiles][2]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum;
        if constexpr (int8_map && kBeside)
          sum = __int2float_rn(static_cast<int>(integer[4 * n + e]));
        else if constexpr (int8_map)  // below 2^30 for 128 columns
          sum = __int2float_rn(static_cast<int>(integer[4 * n + e]) * 256 + static_cast<int>(integer[4 * (kTokenTiles + n) + e]));
        else
          sum = real[4 * n + e];
        acc[n][e] = fmaf(kScaledX ? sum * x_scale[n][e % 2] : sum, row_scale[e / 2], acc[n][e]);
      }
  }
};

// One step by warpgroups: while the tensor cores work on a 16-row block, the warp decodes the next one and adds up the one before.
// `release` is called once the last of the slot has been read. (Keeping the last block in flight into the next step makes ptxas
// serialise all of them.)
template <class Release>
W3_DEVICE void multiply_step_warpgroup(const StepSlot& slot, const Maps& maps, const StagedStep& x, int lane, int token_warp,
                                       Accumulators& acc, Release release) {
  StepWords words;
  words.load(slot.codes, lane, 0);
  const RowScales scales = load_row_scales(slot.scales, lane / 4);
  float x_scale[kTokenTiles][2];
  if constexpr (kScaledX)
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 s = x.scales(8 * (token_warp * kTokenTiles + n) + 2 * (lane % 4));
      x_scale[n][0] = s.x;
      x_scale[n][1] = s.y;
    }
  const u64 operands = operand_descriptor(x.shared + token_warp * (kInt8Map && !kBeside ? 512 : 256) * kTokenTiles);
  BlockFragments<kInt8Map> a[kDepth][2];
  WarpgroupSums<kInt8Map> sums[kDepth][kScaleSets];
  auto collect = [&](int block) {
#pragma unroll
    for (int set = 0; set < kScaleSets; ++set) {
      const float row_scale[2] = {scales.value[set][2 * block], scales.value[set][2 * block + 1]};
      sums[block % kDepth][set].settle();
      sums[block % kDepth][set].add_to(acc.value[block], row_scale, x_scale);
    }
  };
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block + 1 < kVectors) words.load(slot.codes, lane, block + 1);  // a block ahead of its use
    if (kStagedX != kStreamed && block + 2 == kVectors) release();
    if (kHalfStep && !slot.both && block < kVectors) words.clear_second(block);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      u32 selector[4];
      block_selectors<kDense>(words.word[tile], block, selector);
      fragments(selector, maps.map[kRowMaps ? 2 * block : 0], maps.map[kRowMaps ? 2 * block + 1 : 0], a[block % kDepth][tile]);
    }
    wgmma_fence();
    if constexpr (kScaleSets == 1) {
      sums[block % kDepth][0].template multiply<0, 2>(a[block % kDepth], operands);
    } else {
      sums[block % kDepth][0].template multiply<0, 1>(a[block % kDepth], operands);
      sums[block % kDepth][kScaleSets - 1].template multiply<1, 2>(a[block % kDepth], operands);
    }
    wgmma_commit();
    if (kDepth == 1 || block > 0) {
      wgmma_wait<kDepth - 1>();
      collect(block - kDepth + 1);
    }
  }
  if constexpr (kDepth == 2) {
    wgmma_wait<0>();
    collect(3);
  }
  if constexpr (kStagedX == kStreamed) release();  // the tensor cores have read the activations
}
#endif

// One step by single warps.
template <class Release>
W3_DEVICE void multiply_step_warp(const StepSlot& slot, const Maps& maps, const StagedStep& x, int lane, int token_warp, Accumulators& acc,
                                  Release release) {
  constexpr int kReleaseBlock = 1;  // by then what was read has come, and the fence in `release` waits for nothing
  constexpr int kTogether = kTokenTiles <= 2 || !kInt8Map ? 1 : 4;  // row blocks whose fragments are in registers together
  StepWords words;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    words.load(slot.codes, lane, v);
    if (kHalfStep && !slot.both) words.clear_second(v);
  }
  const RowScales scales = load_row_scales(slot.scales, lane / 4);
  TokenOperands b[kTokenTiles <= 2 ? kTokenTiles : 1];
  BlockFragments<kInt8Map> a[kTogether][2];

  constexpr int kParts = kBeside ? 1 : 2;
  auto load_operands = [&](int tile_index, TokenOperands& out) {
    const int n_tile = token_warp * kTokenTiles + tile_index;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        out.part[tile][part] = x.operands(((tile * kParts + part) * kAllTokenTiles + n_tile) * 512 + lane * 16);
    if constexpr (kScaledX) {
      const float2 s = x.scales(8 * n_tile + 2 * (lane % 4));
      out.scale[0] = s.x;
      out.scale[1] = s.y;
      out.offset[0] = -kInteger * s.x;
      out.offset[1] = -kInteger * s.y;
    }
  };
  auto decode = [&](int block, BlockFragments<kInt8Map>(&out)[2]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      u32 selector[4];
      block_selectors<kDense>(words.word[tile], block, selector);
      fragments(selector, maps.map[kRowMaps ? 2 * block : 0], maps.map[kRowMaps ? 2 * block + 1 : 0], out[tile]);
    }
  };
  auto multiply = [&](int block, const BlockFragments<kInt8Map>(&fragment)[2], const TokenOperands& operands, int tile_index) {
    const float first[2] = {scales.value[0][2 * block], scales.value[0][2 * block + 1]};
    if constexpr (kScaleSets == 1) {
      multiply_block<0, 2>(fragment, operands, first, acc.value[block][tile_index]);
    } else {
      const float second[2] = {scales.value[kScaleSets - 1][2 * block], scales.value[kScaleSets - 1][2 * block + 1]};
      multiply_block<0, 1>(fragment, operands, first, acc.value[block][tile_index]);
      multiply_block<1, 2>(fragment, operands, second, acc.value[block][tile_index]);
    }
  };

  if constexpr (kTokenTiles <= 2) {  // activations stay in registers, fragments of a row block come and go
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) load_operands(n, b[n]);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      decode(block, a[0]);
      if (block == kReleaseBlock) release();
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) multiply(block, a[0], b[n], n);
    }
  } else {  // too many activations for registers: they are fetched anew for every kTogether row blocks
#pragma unroll
    for (int first = 0; first < 4; first += kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) decode(first + i, a[i]);
      if (first == 0 && kStagedX != kStreamed) release();
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        load_operands(n, b[0]);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) multiply(first + i, a[i], b[0], n);
      }
    }
    if constexpr (kStagedX == kStreamed) release();
  }
}
