// Compile-time shape of a gateup_decode kernel, its parameters, and its shared memory.
#pragma once
#include "ptx.cuh"

constexpr bool kBf16 = GU_BF16;                // of x and y; float16 otherwise
constexpr bool kPaired = GU_PAIRED;            // gate and up, SiLU and product; one matrix otherwise
constexpr int kTokenTiles = GU_TOKEN_TILES;    // of 8 tokens
constexpr int kHalfRows = GU_HALF_ROWS;        // rows of each half of a row block
constexpr int kPiece = GU_PIECE;               // columns of a slot
constexpr int kSlots = GU_SLOTS;               // of weights and activations in flight
constexpr int kRowWarps = GU_ROW_WARPS;        // working warps that share the rows of a row block
constexpr int kSplitWarps = GU_SPLIT_WARPS;    // working warps that share the columns of a slot
constexpr bool kPartial = GU_PARTIAL;          // 128 does not divide the columns

constexpr int kBlock = 128;                    // rows and columns of a scale block
constexpr int kParts = kPiece / kBlock;        // scale blocks of a slot along its columns
constexpr int kMyParts = kParts / kSplitWarps;
constexpr int kWarps = kRowWarps * kSplitWarps;
constexpr int kConverters = GU_CONVERTERS;     // warps that turn bfloat16 activations into float16; none where they are float16
constexpr int kThreads = 32 * (kWarps + 2 + kConverters);  // two warps feed the others
constexpr int kTiles = kHalfRows / 8 / kRowWarps;  // of 16 rows, 8 from each half, for each warp
constexpr int kQuads = kTiles * kTokenTiles;   // accumulators of a lane, in fours
// A slot: [part][half][row][128 bytes], 16-byte columns exchanged as the copy engine does it (XOR with row % 8).
constexpr int kHalfBytes = kHalfRows * kBlock;
constexpr int kSlotBytes = 2 * kHalfRows * kPiece;
constexpr int kBarrierBytes = (3 * 8 * kSlots + 15) / 16 * 16;  // activations begin at multiples of 16
constexpr int kExchangeBytes = kSplitWarps > 1 ? kWarps * kQuads * 512 : 0;
constexpr int kTokenPitch = 2 * kPiece + 16;   // bytes from token to token in a slot: eight tokens read from different banks
constexpr int kScaleTokens = 8 * kTokenTiles;  // of which a slot has room for scales
constexpr u32 kEmpty = 0xFFFFFFFFu;            // a NaN that no arithmetic produces
// For racecheck, which sees no barrier of a warp that ptxas could leave out: every lane arrives, and not one for all.
#ifndef GU_CHECKED
#define GU_CHECKED 0
#endif
constexpr int kArrivals = GU_CHECKED ? 32 : 1;

static_assert(kHalfRows % (8 * kRowWarps) == 0 && kBlock % (8 * kTiles) == 0, "each warp takes whole tiles of one scale block");
static_assert((kHalfRows % kBlock == 0 || kBlock % kHalfRows == 0) && kHalfRows <= 256, "halves and scale blocks do not overlap by parts");
static_assert(kBf16 ? kConverters > 0 && kTokenTiles * kParts % kConverters == 0 : kConverters == 0, "converting warps take equal shares");
static_assert(kPiece % kBlock == 0 && kParts % kSplitWarps == 0, "each warp takes whole scale blocks of a slot");

struct alignas(64) Params {
  TensorMap first_map, second_map;  // of the two matrices: E4M3 [rows, columns]; gate and up, or the only one twice
  const u16* x;                     // [tokens, columns], rows at multiples of 16 bytes
  const float* first_scales;        // [ceil(rows / 128), scale_columns]
  const float* second_scales;
  u16* y;                           // [tokens, rows]
  char* partials;                   // [blocks, kRowWarps, kQuads, 32, 16 bytes], all kEmpty between launches
  i64 x_stride;                     // elements from token to token
  int tokens, rows, columns;
  int scale_columns;
  int pieces;                       // slots that a row block's columns take
  u32 piece_reciprocal;             // (2^32 - 1) / pieces
  int run_units, longer_runs;       // units of a thread block: run_units + 1 for the first longer_runs blocks
  int unused[12];
};

// Addresses in shared memory: slots | exchange | barriers | activations [slot][token][kTokenPitch] | their scales [slot][part][token].
struct SharedMap {
  u32 slots, exchange, full, empty, raw, x, x_scales;
  u32 x_place;  // bytes from slot to slot

  W3_DEVICE SharedMap(u32 base, const Params& p) {
    slots = (base + 1023) & ~1023u;  // the exchange of columns goes by address
    exchange = slots + kSlots * kSlotBytes;
    full = exchange + kExchangeBytes;  // weights have arrived, and activations are there in float16
    empty = full + 8 * kSlots;         // everything of a slot has been read
    raw = empty + 8 * kSlots;          // activations in bfloat16 have arrived
    x = full + kBarrierBytes;
    x_place = p.tokens * kTokenPitch;
    x_scales = x + kSlots * x_place;
  }
};
