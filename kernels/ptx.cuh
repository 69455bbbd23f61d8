// One named wrapper for each PTX instruction that the kernels use, with the reason for it.
// No includes: NVRTC builds this text with nothing but this folder on its path.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define W3_DEVICE __device__ __forceinline__

struct alignas(16) Vec4 {
  u32 x, y, z, w;
};

struct alignas(16) Float4 {
  float x, y, z, w;
};

// Byte permute: each of the four low nibbles of `selector` picks one of the eight bytes of (low, high). This is the table
// lookup: the table sits in two registers and a code word, masked, is the selector.
W3_DEVICE u32 permute(u32 low, u32 high, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// (a & mask) | b in one instruction.
template <u32 mask>
W3_DEVICE u32 masked_or(u32 a, u32 b) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "n"(mask), "r"(b));
  return out;
}

// D = A B + D on int8 tensor cores, 16 rows x 8 columns, k = 32.
W3_DEVICE void mma_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D = A B + D on float16 tensor cores with float32 accumulators, 16 rows x 8 columns, k = 16.
W3_DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

W3_DEVICE float half_to_float(u32 bits) {
  float out;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "r"(bits));
  return out;
}

// Two floats as two float16, round to nearest even: `low` in the low half.
W3_DEVICE u32 floats_to_half2(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

W3_DEVICE u32 floats_to_bfloat2(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// The larger of each half; NaN wins.
template <bool bf16>
W3_DEVICE u32 larger_halves(u32 a, u32 b) {
  u32 out;
  if constexpr (bf16)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The larger magnitude of each half of two bfloat16, with some sign; NaN wins. One instruction, where taking signs off first is two more
// (sm_86 on).
W3_DEVICE u32 larger_magnitudes(u32 a, u32 b) {
  u32 out;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

W3_DEVICE float reciprocal_estimate(float value) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
}

// Opaque, so that the compiler keeps the address and does not work it out again at every use.
W3_DEVICE u32 shared_address(const void* pointer) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return address;
}

W3_DEVICE Vec4 load_shared(u32 address) {
  Vec4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

W3_DEVICE Vec4 load_global(const void* pointer) {
  Vec4 v;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}

W3_DEVICE float2 load_shared_floats(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

W3_DEVICE Float4 load_shared_float4(u32 address) {
  Float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

W3_DEVICE void store_shared_floats(u32 address, Float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

W3_DEVICE void store_shared(u32 address, Vec4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

W3_DEVICE void store_shared_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Reads that other thread blocks may still be writing to: relaxed at device scope, so never answered from L1.
W3_DEVICE Vec4 load_relaxed(const void* pointer) {
  Vec4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

W3_DEVICE void store_relaxed(void* pointer, Vec4 v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A barrier among `threads` threads (a multiple of 32) of the block, without the rest.
W3_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- 16-byte asynchronous copies: sm_80 and later

W3_DEVICE void copy_async16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

W3_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's latest groups are in flight.
template <int pending>
W3_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Products of two bfloat16 each, subnormal ones too.
W3_DEVICE u32 multiply_bfloat2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// ---- bulk copies, transaction barriers and dependent launches: sm_90 and later

W3_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barrier_init visible to the copy engine.
W3_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

W3_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

W3_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

W3_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// One instruction moves a whole contiguous block (a multiple of 16 bytes) and counts its bytes at `barrier`.
W3_DEVICE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Gives registers back, or takes them, for all warps of a warpgroup; code for exactly one architecture only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL)  // ptxas ignores it for sm_120a
#define W3_TRADES_REGISTERS 1
#endif
template <int registers>
W3_DEVICE void registers_down() {
#if W3_TRADES_REGISTERS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

template <int registers>
W3_DEVICE void registers_up() {
#if W3_TRADES_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

// True in one lane of a converged warp. Unlike a test of the lane number, the compiler knows that only one thread passes, and
// feeds the copy engine from uniform registers without a loop over lanes.
W3_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// ---- clusters: blocks that are resident together and reach each other's shared memory

// A barrier of every thread of every block of the cluster, with what they wrote before.
W3_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, for the whole cluster, of what lies at `shared` in block `rank` of it.
W3_DEVICE u32 in_block(u32 shared, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Arrives at a barrier of any block of the cluster; orders nothing but what its thread has done with.
W3_DEVICE void cluster_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores to an address of any block of the cluster, and tells a barrier of the same block that 16 bytes have come.
W3_DEVICE void store_async(u32 address, Float4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

// Ordinary writes to shared memory become visible to the asynchronous units (tensor cores, copy engine).
W3_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The next kernel of the stream may be placed on multiprocessors as this one leaves them.
W3_DEVICE void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Everything that earlier kernels of the stream wrote is visible after this; nothing of theirs may be touched before.
W3_DEVICE void wait_for_predecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
W3_DEVICE void launch_dependents() {}
W3_DEVICE void wait_for_predecessors() {}
#endif

// Four E4M3 numbers -> float16, exactly: bytes 0 and 1 in `low`, bytes 2 and 3 in `high`. One instruction for two numbers (sm_89 on).
W3_DEVICE void e4m3_to_halves(u32 bytes, u32& low, u32& high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// A float that no kernel changes while this one runs.
W3_DEVICE float load_constant(const float* pointer) {
  float out;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(out) : "l"(pointer));
  return out;
}

// What the copy engine knows of a matrix, made by cuTensorMapEncodeTiled; a kernel parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

#if __CUDA_ARCH__ >= 900
W3_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One instruction moves a box of a matrix, whose first byte stands at (column, row), and counts its bytes at `barrier`. What lies
// beyond the matrix arrives as zeros and is counted too.
W3_DEVICE void copy_box(u32 shared, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
               "l"(&map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}
#endif

// Two floats as two E4M3, round to nearest even, saturating: `low` in the low byte (sm_89 on).
W3_DEVICE u32 floats_to_e4m3(float low, float high) {
  u32 out;
  asm("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h; }" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
