// Wide warpgroup matrix instructions (sm_90a): 64 rows x N columns, k = 16, A from registers, B from shared memory as the copy engine
// writes it with 128-byte swizzle, sums in float32. N is twice the sums of a lane: 64 to 256 in steps of 32.
//
// B lies in shared memory as rows of 128 bytes, 64 values of k for each of its N columns; eight rows are a swizzled block of 1024 bytes,
// to which they are aligned. The 16 values of k of an instruction are 32 neighbouring bytes of each row: the next ones begin at an
// address 32 higher, since the swizzle is a function of address bits.
#pragma once
#include "wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
// Start address, 1024 bytes to the next eight rows, and "128-byte swizzle" in the top bits; a field for the k direction means nothing here.
W3_DEVICE u64 swizzled_descriptor(u32 shared) {
  return static_cast<u64>((shared & 0x3FFFFu) >> 4) | static_cast<u64>(1) << 16 | static_cast<u64>(1024 >> 4) << 32 |
         static_cast<u64>(1) << 62;
}

// The next 16 values of k.
constexpr u64 kNextSixteen = 32 >> 4;

// Operand numbers and operands of a lane's sums, 16 at a time: an instruction's text has to name each register.
#define W3_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define W3_NAMES_1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define W3_NAMES_2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define W3_NAMES_3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define W3_NAMES_4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define W3_NAMES_5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define W3_NAMES_6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define W3_NAMES_7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define W3_SUMS(b) \
  "+f"(d[b + 0]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
  "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7]), \
  "+f"(d[b + 8]), "+f"(d[b + 9]), "+f"(d[b + 10]), "+f"(d[b + 11]), \
  "+f"(d[b + 12]), "+f"(d[b + 13]), "+f"(d[b + 14]), "+f"(d[b + 15])
#define W3_NAMES_TO_2 W3_NAMES_0 W3_NAMES_1
#define W3_NAMES_TO_3 W3_NAMES_TO_2 W3_NAMES_2
#define W3_NAMES_TO_4 W3_NAMES_TO_3 W3_NAMES_3
#define W3_NAMES_TO_5 W3_NAMES_TO_4 W3_NAMES_4
#define W3_NAMES_TO_6 W3_NAMES_TO_5 W3_NAMES_5
#define W3_NAMES_TO_7 W3_NAMES_TO_6 W3_NAMES_6
#define W3_NAMES_TO_8 W3_NAMES_TO_7 W3_NAMES_7
#define W3_SUMS_TO_2 W3_SUMS(0), W3_SUMS(16)
#define W3_SUMS_TO_3 W3_SUMS_TO_2, W3_SUMS(32)
#define W3_SUMS_TO_4 W3_SUMS_TO_3, W3_SUMS(48)
#define W3_SUMS_TO_5 W3_SUMS_TO_4, W3_SUMS(64)
#define W3_SUMS_TO_6 W3_SUMS_TO_5, W3_SUMS(80)
#define W3_SUMS_TO_7 W3_SUMS_TO_6, W3_SUMS(96)
#define W3_SUMS_TO_8 W3_SUMS_TO_7, W3_SUMS(112)

// D = A B + D. `a0` .. `b` name the operands that follow the sums.
#define W3_WGMMA_WIDE(n, type, blocks, a0, a1, a2, a3, b_) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" W3_NAMES_TO_##blocks "}, " \
               "{" a0 ", " a1 ", " a2 ", " a3 "}, " b_ ", p, 1, 1, 0; }" \
               : W3_SUMS_TO_##blocks \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define W3_WGMMA_OF(n, sums, blocks, a0, a1, a2, a3, b_) \
  template <bool bf16> \
  W3_DEVICE void wgmma_wide(float (&d)[sums], const u32 (&a)[4], u64 b) { \
    if constexpr (bf16) \
      W3_WGMMA_WIDE(n, "bf16", blocks, a0, a1, a2, a3, b_); \
    else \
      W3_WGMMA_WIDE(n, "f16", blocks, a0, a1, a2, a3, b_); \
  }

W3_WGMMA_OF(64, 32, 2, "%32", "%33", "%34", "%35", "%36")
W3_WGMMA_OF(96, 48, 3, "%48", "%49", "%50", "%51", "%52")
W3_WGMMA_OF(128, 64, 4, "%64", "%65", "%66", "%67", "%68")
W3_WGMMA_OF(160, 80, 5, "%80", "%81", "%82", "%83", "%84")
W3_WGMMA_OF(192, 96, 6, "%96", "%97", "%98", "%99", "%100")
W3_WGMMA_OF(224, 112, 7, "%112", "%113", "%114", "%115", "%116")
W3_WGMMA_OF(256, 128, 8, "%128", "%129", "%130", "%131", "%132")

#undef W3_WGMMA_OF
#undef W3_WGMMA_WIDE
#endif
