// Activations of many tokens -> staged B operands in global memory, once for all thread blocks of w3_decode.
//
// Shapes: x [tokens, columns] -> staged [steps, kStepXBytes], scales [steps, 8 * kAllTokenTiles]; the order inside a
// step is w3_activations.cuh's. One thread block for 8 tokens of a step; a half warp stages one token at
// a time.
#include "ptx.cuh"
#include "w3_activations.cuh"

constexpr bool kBf16 = W3_BF16;
constexpr bool kInt8Map = W3_INT8_MAP;
constexpr int kAllTokenTiles = W3_TOKEN_TILES * W3_TOKEN_WARPS;
constexpr bool kBeside = W3_BESIDE;
constexpr int kStepXBytes = (kBeside ? 1024 : 2048) * kAllTokenTiles;
constexpr int kRounds = kBeside ? 1 : 2;  // of four tokens

struct alignas(16) Params {
  const u16* x;
  char* staged;
  float* scales;
  i64 x_stride;
  int tokens, columns, x_aligned, unused;
};

// 64 threads, from sm_90 on of at most 32 registers: blocks of the next call wait beside a decode kernel that leaves little room.
#if __CUDA_ARCH__ >= 900
#define W3_STAGE_BOUNDS __maxnreg__(32)
#else
#define W3_STAGE_BOUNDS __launch_bounds__(64)
#endif
extern "C" __global__ void W3_STAGE_BOUNDS w3_stage(const __grid_constant__ Params p) {
  launch_dependents();
  wait_for_predecessors();
  const Activations in = {p.x, p.x_stride, p.tokens, p.columns, p.x_aligned};
  const int step = blockIdx.x / kAllTokenTiles, first = blockIdx.x % kAllTokenTiles * 8, part16 = threadIdx.x % 16;
  char* const out = p.staged + static_cast<i64>(step) * kStepXBytes;
  float* const scales = p.scales + static_cast<i64>(step) * 8 * kAllTokenTiles;
  Vec4 raw[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i)  // tokens past the last repeat it: whole tiles are written, nothing is undefined
    raw[i] = load_eight(in, min(first + static_cast<int>(threadIdx.x) / 16 + 4 * i, p.tokens - 1), step * kStepColumns + 8 * part16);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    stage_eight<kBf16, kInt8Map, W3_WARPGROUPS, W3_TOKEN_TILES, W3_TOKEN_WARPS, kBeside>(raw[i], part16, first + threadIdx.x / 16 + 4 * i, out, scales);
}
