// Takes the place of kernels/ptx.cuh: what the prefill kernel uses of it, and of CUDA, on a host. Also the wrappers that the kernel's own
// files define in assembly; tests/ops/test_w3_prefill_emulated.py cuts those out.
//
// Modelled: transaction barriers with their byte counts, copies that land at the first moment at which they may (as soon as they are asked
// for), multicast, 128-byte swizzle, zeros beyond a matrix, named and cluster barriers, exchanges between lanes, transposing stores,
// roundings to 16 bits, alignment, and the end of shared memory.
// Not modelled: the order of memory between the ordinary and the asynchronous units (fences do nothing), register counts, dependent
// launches, banks, caches and time. Blocks of different clusters run one after the other.
#pragma once
#include <cmath>

#include "threads.h"

using std::max;
using std::min;

#define W3_DEVICE inline
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __ldg(pointer) (*(pointer))

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) Vec4 {
  u32 x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- numbers

inline float __uint_as_float(u32 bits) {
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline u32 bits_of(float value) {
  u32 out;
  memcpy(&out, &value, 4);
  return out;
}

inline std::vector<float> all_halves() {
  std::vector<float> out;
  for (u32 bits = 0; bits < 0x10000; ++bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                      : std::ldexp(static_cast<float>(fraction), -24);
    out.push_back(bits >> 15 ? -size : size);
  }
  return out;
}

inline const std::vector<float> kHalves = all_halves();

inline float half_to_float(u32 bits) {
  REQUIRE(bits < 0x10000, "half_to_float of more than 16 bits: %x", bits);
  return kHalves[bits];
}

// To the nearest, ties to even.
inline u32 half_of(float value) {
  const u32 sign = bits_of(value) >> 16 & 0x8000u;
  const float size = std::fabs(value);
  if (size != size) return 0x7FFF;
  if (size >= 65520.0f) return sign | 0x7C00;
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const u32 steps = static_cast<u32>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // of the last place; 2048 where it carries
  return sign | (steps + (exponent + 14) * 1024);  // 1024 of a normal number's steps are its exponent's lowest bit
}

inline u32 bfloat_of(float value) {
  const u32 bits = bits_of(value);
  return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline u32 floats_to_half2(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline u32 floats_to_bfloat2(float low, float high) { return bfloat_of(low) | bfloat_of(high) << 16; }

// prmt: bit 3 of a nibble spreads the sign of the byte that the others pick.
inline u32 permute(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | static_cast<u64>(high) << 32;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
    out |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return out;
}

template <u32 mask>
inline u32 masked_or(u32 a, u32 b) {
  return (a & mask) | b;
}

inline u32 kept(u32 value) { return value; }

// ---- shared memory: the block's rank in the top byte of an address

extern char shared[];  // the array that the kernel declares; stands for the beginning of whichever block runs

inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(self->rank) << 24 | static_cast<u32>(static_cast<const char*>(pointer) - shared);
}

inline u32 in_block(u32 address, u32 rank) { return (address & 0xFFFFFFu) | rank << 24; }

inline char* at(u32 address, u32 bytes, u32 alignment) {
  const u32 offset = address & 0xFFFFFFu;
  REQUIRE(offset + bytes <= shared_bytes, "shared address %x + %u is beyond %u bytes", offset, bytes, shared_bytes);
  REQUIRE(offset % alignment == 0, "shared address %x is no multiple of %u", offset, alignment);
  return blocks[address >> 24]->shared + offset;
}

inline Vec4 load_shared(u32 address) {
  Vec4 out;
  memcpy(&out, at(address, 16, 16), 16);
  return out;
}

inline void store_shared_floats(u32 address, const Float4& value) { memcpy(at(address, 16, 16), &value, 16); }

inline u32 load_shared_word(u32 address) {
  u32 out;
  memcpy(&out, at(address, 4, 4), 4);
  return out;
}

// ---- lanes of a warp

inline int my_lane() { return threadIdx.x % 32; }
inline void meet_warp(const char* kind) { meet(my_block().warps[threadIdx.x / 32], kind); }

// Shows `count` words to the other lanes; what they show, by lane.
inline const u32 (*shown(const u32* words, int count, const char* kind))[8] {
  const u32 warp = threadIdx.x / 32;
  auto& slots = my_block().slots[warp][my_block().warps[warp].round % 2];
  memcpy(slots[my_lane()], words, 4 * count);
  meet_warp(kind);
  return slots;
}

inline u32 __shfl_xor_sync(u32, u32 value, int other) { return shown(&value, 1, "shfl.xor")[my_lane() ^ other][0]; }
inline u32 __shfl_sync(u32, u32 value, int lane) { return shown(&value, 1, "shfl")[lane][0]; }
inline void __syncwarp() { meet_warp("syncwarp"); }
inline bool elect_one() { return my_lane() == 0; }

// stmatrix.trans, x4: lane 8 i + m says where row m of matrix i goes; its number c comes from register i of lane 4 c + m / 2.
inline void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[4] = {a, b, c, d}, matrix = my_lane() / 8, row = my_lane() % 8;
  const auto lanes = shown(words, 4, "stmatrix");
  char* const to = at(address, 16, 16);
  for (u32 column = 0; column < 8; ++column) {
    const u16 number = static_cast<u16>(lanes[4 * column + row / 2][matrix] >> 16 * (row % 2));
    memcpy(to + 2 * column, &number, 2);
  }
  meet_warp("stmatrix");
}

// ---- barriers

inline void __syncthreads() { meet(my_block().named[0], "syncthreads"); }
inline void cluster_barrier() { meet(*cluster, "cluster barrier"); }

inline void named_barrier(int id, int threads) {
  Meeting& meeting = my_block().named[id];
  meeting.size = threads;
  meet(meeting, "named barrier");
}

inline Barrier& barrier_at(u32 address) {
  at(address, 8, 8);
  return blocks[address >> 24]->barriers[(address & 0xFFFFFFu) / 8];
}

inline void settle(Barrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
}

inline void arrive(u32 address, u32 bytes) {
  Barrier& barrier = barrier_at(address);
  REQUIRE(barrier.arrivals != 0, "arrived at a barrier that is not initialised");
  REQUIRE(barrier.missing != 0, "more arrivals at a barrier than it was made for");
  barrier.bytes += bytes;
  --barrier.missing;
  settle(barrier);
}

inline void count_bytes(u32 address, u32 bytes) {
  Barrier& barrier = barrier_at(address);
  REQUIRE(barrier.arrivals != 0, "bytes for a barrier that is not initialised");
  barrier.bytes -= bytes;
  settle(barrier);
}

inline void barrier_init(u32 address, u32 arrivals) {
  barrier_at(address).arrivals = arrivals;
  barrier_at(address).missing = arrivals;
}

inline void barrier_wait(u32 address, u32 parity) {
  REQUIRE(barrier_at(address).arrivals != 0, "waited at a barrier that is not initialised");
  wait_while(barrier_at(address).phase, 1, parity);  // until the phase of that parity has ended
}

inline void barrier_init_fence() {}
inline void barrier_expect(u32 address, u32 bytes) { arrive(address, bytes); }
inline void barrier_arrive(u32 address) { arrive(address, 0); }
inline void cluster_arrive(u32 address) { arrive(address, 0); }

// ---- the copy engine

// Made by the test, and not by the driver.
struct alignas(64) TensorMap {
  u64 matrix, rows, columns, row_bytes, box_rows, box_columns, unused[10];
};

inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  REQUIRE(bytes % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0, "bulk copy of %u bytes that is not aligned", bytes);
  memcpy(at(to, bytes, 16), from, bytes);
  count_bytes(barrier, bytes);
}

inline void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  const u32 bytes = map.box_rows * 128;
  REQUIRE(map.box_columns == 128 && map.row_bytes % 16 == 0 && map.matrix % 16 == 0, "a map that the driver would refuse");
  char* const box = at(to, bytes, 1024);
  for (u32 r = 0; r < map.box_rows; ++r)
    for (u32 c = 0; c < 128; ++c) {
      const bool inside = row + r < map.rows && column + c < map.columns;
      box[r * 128 + (c ^ r % 8 * 16)] = inside ? reinterpret_cast<const char*>(map.matrix)[(row + r) * map.row_bytes + column + c] : 0;
    }
  count_bytes(barrier, bytes);
}

inline void copy_box_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 ranks) {
  for (u32 rank = 0; rank < kMaxCluster; ++rank)
    if (ranks >> rank & 1) copy_box(in_block(to, rank), map, column, row, in_block(barrier, rank));
}

// ---- without an effect here

inline void prefetch_map(const TensorMap&) {}
inline void fence_async_shared() {}
inline void launch_dependents() {}
inline void wait_for_predecessors() {}
template <int registers>
inline void registers_up() {}
template <int registers>
inline void registers_down() {}
