// Takes the place of kernels/wgmma.cuh, and of the instructions in kernels/wgmma_wide.cuh: asynchronous matrix instructions that read their
// operands, registers too, at the last moment at which they may, when a wait asks for them. Until then sums stay as they were.
//
// Modelled for each warp by itself; that four warps go together is not. Products and sums are float32, in the order of columns; the tensor
// cores' own order and rounding are not modelled.
#pragma once
#include "ptx.cuh"

struct Instruction {
  float* sums;
  const u32* a;
  u64 b;
  int columns;
  bool bf16;
  int group;  // number of the group that it was committed to; none yet: 0
};

constexpr int kMaxThreads = 32 * kMaxWarps;
inline std::vector<Instruction> in_flight[kMaxCluster][kMaxThreads];
inline bool fenced[kMaxCluster][kMaxThreads];
inline int groups[kMaxCluster][kMaxThreads];  // committed so far

inline std::vector<Instruction>& my_instructions() { return in_flight[self->rank][threadIdx.x]; }

inline void wgmma_fence() { fenced[self->rank][threadIdx.x] = true; }

inline void wgmma_commit() {
  const int group = ++groups[self->rank][threadIdx.x];
  for (Instruction& instruction : my_instructions())
    if (instruction.group == 0) instruction.group = group;
  fenced[self->rank][threadIdx.x] = false;
}

template <bool bf16, int sums>
inline void wgmma_wide(float (&d)[sums], const u32 (&a)[4], u64 b) {
  REQUIRE(fenced[self->rank][threadIdx.x], "wgmma without a fence behind the writes to its registers");
  my_instructions().push_back({d, a, b, 2 * sums, bf16, 0});
}

inline float number(u32 bits, bool bf16) { return bf16 ? __uint_as_float(bits << 16) : kHalves[bits]; }

// The lane's part: rows g and g + 8 of the warp's 16, columns 8 n + 2 t, + 1.
inline void perform(const Instruction& i) {
  const int g = my_lane() / 4, t = my_lane() % 4;
  const auto lanes = shown(i.a, 4, "wgmma");
  float a[2][16];  // k 2 u + e of lane (g, u)'s registers 0, 1 and 8 more of its registers 2, 3
  for (int u = 0; u < 4; ++u)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < 2; ++e) a[r % 2][8 * (r / 2) + 2 * u + e] = number(lanes[4 * g + u][r] >> 16 * e & 0xFFFF, i.bf16);
  // start address / 16, 1024 / 16 bytes to the next eight rows, 128-byte swizzle; the field in between means nothing then
  REQUIRE((i.b & ~(0x3FFFull | 0x3FFFull << 16)) == (1ull << 62 | 64ull << 32), "an unexpected descriptor: %llx", i.b);
  const u32 start = (i.b & 0x3FFF) << 4;
  for (int column = 0; column < i.columns; ++column) {
    if (column % 8 / 2 != t) continue;
    float sum[2] = {0, 0};
    for (int half = 0; half < 2; ++half) {
      u32 address = start + column * 128 + 16 * half;
      address ^= (address >> 7 & 7) << 4;  // a function of the address, wherever the operand begins
      u16 x[8];
      memcpy(x, at(in_block(address, self->rank), 16, 16), 16);
      for (int k = 0; k < 8; ++k)
        for (int r = 0; r < 2; ++r) sum[r] += a[r][8 * half + k] * number(x[k], i.bf16);
    }
    for (int r = 0; r < 2; ++r) i.sums[4 * (column / 8) + 2 * r + column % 2] += sum[r];
  }
}

// Performs what belongs to all but the latest `pending` groups.
template <int pending>
inline void wgmma_wait() {
  auto& instructions = my_instructions();
  const int last = groups[self->rank][threadIdx.x] - pending;
  while (!instructions.empty() && instructions.front().group != 0 && instructions.front().group <= last) {
    perform(instructions.front());
    instructions.erase(instructions.begin());
  }
  meet_warp("wgmma wait");
}
