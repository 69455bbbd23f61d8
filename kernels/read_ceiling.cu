// How fast this device can read: every byte once through bulk copies into shared memory, and nothing else. Benchmarks put a
// kernel's time beside this one's over the same bytes.
//
// Each block reads pieces blockIdx.x, blockIdx.x + gridDim.x, ... of kPieceBytes, kPieces of them in flight. One word of each piece
// is added up and written at the end, so that no copy can be left out.
#include "ptx.cuh"

constexpr int kPieceBytes = READ_PIECE_BYTES;
constexpr int kPieces = READ_PIECES;

struct alignas(16) Params {
  const char* data;
  u32* sums;
  i64 bytes;
  i64 unused;
};

extern "C" __global__ void __launch_bounds__(32, 1) read_ceiling(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  const u32 slots = shared_address(shared), barriers = slots + kPieces * kPieceBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPieces; ++i) barrier_init(barriers + 8 * i, 1);
    barrier_init_fence();
    launch_dependents();
    const i64 pieces = (p.bytes + kPieceBytes - 1) / kPieceBytes;
    auto ask = [&](i64 piece, int slot) {
      if (piece >= pieces) return;
      const i64 left = p.bytes - piece * kPieceBytes;
      const u32 bytes = static_cast<u32>(left < kPieceBytes ? left : kPieceBytes) & ~15u;
      barrier_expect(barriers + 8 * slot, bytes);
      copy_bulk(slots + slot * kPieceBytes, p.data + piece * kPieceBytes, bytes, barriers + 8 * slot);
    };
    for (int i = 0; i < kPieces; ++i) ask(blockIdx.x + static_cast<i64>(i) * gridDim.x, i);
    u32 sum = 0, parity = 0;
    int slot = 0;
    for (i64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
      barrier_wait(barriers + 8 * slot, parity);
      sum += *reinterpret_cast<volatile u32*>(shared + slot * kPieceBytes);
      ask(piece + static_cast<i64>(kPieces) * gridDim.x, slot);
      if (++slot == kPieces) {
        slot = 0;
        parity ^= 1;
      }
    }
    wait_for_predecessors();
    p.sums[blockIdx.x] = sum;
  }
#endif
}
