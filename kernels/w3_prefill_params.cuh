// Compile-time shape of a w3_prefill kernel, its parameters, and where things lie in shared memory.
#pragma once
#include "w3_words.cuh"
#include "wgmma_wide.cuh"

constexpr bool kBf16 = W3_BF16;
constexpr int kTokens = W3_TOKENS;    // of a block tile: 64 to 256 in steps of 32
constexpr int kSlots = W3_SLOTS;      // steps in flight
constexpr int kCluster = W3_CLUSTER;  // blocks that take the same tokens and each fetch a part of them for all: 1 or 2
constexpr bool kSplit = W3_SPLIT;     // both warpgroups take one row tile, and its steps in turn
// For racecheck: every lane arrives, and not one for all (w3_decode_params.cuh).
#ifndef W3_CHECKED
#define W3_CHECKED 0
#endif
constexpr int kArrivals = W3_CHECKED ? 32 : 1;

constexpr int kStepColumns = 64;  // a step is one tile wide
constexpr int kGroups = 2;        // warpgroups that multiply
constexpr int kWorkers = 4 * kGroups;
constexpr int kRowTiles = kSplit ? 1 : kGroups;         // of a block tile
constexpr int kStride = kSplit ? kGroups : 1;           // from one step of a warpgroup to its next
constexpr int kLeavers = kSplit ? 4 : kWorkers;         // warps that read a slot
constexpr int kThreads = 32 * (kWorkers + 4);
constexpr int kSums = kTokens / 2;  // sums of a lane
constexpr int kFeederRegisters = 40, kWorkerRegisters = 232;

// A slot: activations [kTokens][128 bytes], swizzled; of each row tile codes and the scales of their group.
constexpr int kXBytes = kTokens * 128;
constexpr int kScaleBytes = 128;
constexpr int kRowTileBytes = kTileBytes + kScaleBytes;
constexpr int kWeightBytes = kRowTiles * kRowTileBytes;
// Finished sums on their way out, for each warpgroup two buffers of [kChunk][64 rows].
constexpr int kChunk = 32;  // tokens
constexpr int kChunkBytes = kChunk * 128;

static_assert(kTokens % 32 == 0 && kTokens >= 64 && kTokens <= 256, "there are matrix instructions for these");
static_assert(kSlots >= (kSplit ? 5 : 3), "workers ask for the next step before they leave the last one: three are in hand, or five");
static_assert(kCluster == 1 || kCluster == 2, "a block fetches all of its tokens, or half of them");
static_assert(!kSplit || kTokens % (2 * kChunk) == 0, "each warpgroup finishes every other chunk");

struct alignas(64) Params {
  TensorMap x_map;     // x as bytes [tokens, 2 * columns], boxes of kTokens / kCluster rows x 128 bytes
  const char* codes;
  const char* scales;
  const void* qmap;
  const u16* bias;     // or null
  u16* y;              // [tokens, rows]
  int tokens, rows;
  int row_tiles, column_tiles, groups, tiles_per_group;
  int map_tiles;       // row tiles that share a map; 0: one map for all
  int steps;           // of 64 columns, up to the last column of x
  int token_tiles;     // of kTokens
  int tiles;           // row blocks (of kCluster * kRowTiles row tiles) * token tiles
  int y_aligned;       // 8 divides the rows, and y begins at a multiple of 16 bytes
};

// Addresses in shared memory: [x: kSlots][codes and scales: kSlots][out: kGroups x 2][full: kSlots][empty: kSlots].
struct SharedMap {
  u32 x, weights, out, full, empty;

  W3_DEVICE explicit SharedMap(u32 base)
      : x(base),
        weights(x + kSlots * kXBytes),
        out(weights + kSlots * kWeightBytes),
        full(out + kGroups * 2 * kChunkBytes),
        empty(full + 8 * kSlots) {}
};

// A position in the ring of slots. Barriers' phases alternate from round to round.
struct Place {
  int slot;
  u32 parity;

  W3_DEVICE void next() { advance(1); }
  // By fewer than there are slots.
  W3_DEVICE void advance(int steps) {
    slot += steps;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
  W3_DEVICE void advance_far(int steps) {
    const int rounds = steps / kSlots;
    parity ^= rounds & 1;
    advance(steps - rounds * kSlots);
  }
};
