// Compile-time shape of a w3_decode kernel and its parameters.
#pragma once
#include "w3_activations.cuh"
#include "w3_words.cuh"

constexpr bool kBf16 = W3_BF16;
constexpr int kTokenTiles = W3_TOKEN_TILES;    // of 8 tokens, for each warp
constexpr int kRowWarps = W3_ROW_WARPS;        // row tiles of a row block
constexpr int kSplitWarps = W3_SPLIT_WARPS;    // warps that share a row tile's steps
constexpr int kTokenWarps = W3_TOKEN_WARPS;    // warps that share a row tile's tokens
constexpr int kSlots = W3_SLOTS;               // of weights in flight
constexpr int kScaleSets = W3_SCALE_SETS;      // 1: groups are whole steps, 2: each tile has its own
constexpr int kStagedX = W3_STAGED_X;          // where activations are staged and kept, one of the following, or the length of a ring
constexpr int kOwn = 0, kFromGlobal = -1, kKept = -2, kStreamed = -3;
// kOwn: staged by this block, all that it needs is kept. kKept: staged by w3_stage.cu, copied here once and kept. n > 0: staged by
// w3_stage.cu and streamed through a ring of n steps. kStreamed: staged by w3_stage.cu, in the slots beside the weights. kFromGlobal:
// staged by w3_stage.cu, read from global memory at each use.
constexpr bool kBulk = W3_BULK;
constexpr bool kWarpgroups = W3_WARPGROUPS;   // matrix instructions of whole warpgroups (sm_90a) instead of single warps
constexpr int kDepth = W3_DEPTH;               // 16-row blocks whose products a warpgroup has in flight, 1 or 2
constexpr bool kHalfStep = W3_HALF_STEP;       // the number of column tiles is odd: the last step is one tile

constexpr int kWarps = kRowWarps * kSplitWarps * kTokenWarps;
constexpr bool kFed = kBulk;                             // four more warps feed the others
constexpr int kWeightFeeders = kStagedX == kOwn ? 1 : 3;  // of the four
constexpr int kThreads = 32 * (kWarps + (kFed ? 4 : 0));
// Registers: a launch gives every thread the same. Where workers need more, feeders hand theirs over; there, beside a block of eight
// workers, stays room for the blocks that stage the next call's activations (w3_stage.cu), so that the next launch can follow as soon
// as blocks leave.
#if W3_TRADES_REGISTERS
constexpr bool kTrades = kFed;
#else
constexpr bool kTrades = false;
#endif
constexpr bool kBesideStaging = kTrades && kStagedX != kOwn && kStagedX != kFromGlobal && kTokenTiles < 4 && kWarps <= 8;
constexpr int kFairRegisters = (65536 - (kBesideStaging ? 4096 : 0)) / ((kThreads + 127) / 128 * 128) / 8 * 8;  // a quarter for each scheduler
constexpr int kLaunchRegisters = kFairRegisters < 255 ? kFairRegisters : 255;
constexpr int kFeederRegisters = kStagedX == kOwn ? 64 : 40;
constexpr int kGivenRegisters = (kLaunchRegisters * kThreads - 128 * kFeederRegisters) / (32 * kWarps) / 8 * 8;
// registers change hands in whole warpgroups: no four warps may hold both kinds
constexpr bool kTradeRegisters = kTrades && kWarps % 4 == 0 && kGivenRegisters > kLaunchRegisters && kGivenRegisters < 256;
constexpr int kWorkerRegisters = kTradeRegisters ? kGivenRegisters : kLaunchRegisters;
constexpr bool kWorkersStage = kWarps < 16;              // with fewer registers staging would spill
constexpr bool kKeepsX = kStagedX == kOwn || kStagedX == kKept;
constexpr int kAllTokenTiles = kTokenTiles * kTokenWarps;
constexpr int kQuads = 4 * kTokenTiles;                  // accumulators of a lane, in fours
// A slot holds kSlotSteps neighbouring steps of every row tile of the row block: codes, then the scales of their groups. The split
// warps form kSlotGroups groups; slot after slot goes to group after group.
constexpr int kSlotSteps = W3_SLOT_STEPS;
constexpr int kSlotGroups = kSplitWarps / kSlotSteps;
constexpr int kSlotRows = kRowWarps * (kBulk ? 1 : kTokenWarps);
constexpr int kSlotCodeBytes = kSlotSteps * 2 * kTileBytes;
constexpr int kSlotRowBytes = kSlotCodeBytes + kSlotSteps * 128 * kScaleSets;
constexpr int kSlotReaders = kWarps / kSlotGroups;
constexpr bool kBeside = W3_BESIDE;                      // at most four tokens, whose two planes lie beside each other in one tile
constexpr int kStepXBytes = (kBeside ? 1024 : 2048) * kAllTokenTiles;  // staged activations of a step
constexpr int kStepXScales = 8 * kAllTokenTiles;
constexpr int kSlotXAt = kSlotRows * kSlotRowBytes;      // where streamed activations lie in a slot: operands, then scales
constexpr int kSlotScalesAt = kSlotXAt + kSlotSteps * kStepXBytes;
constexpr int kSlotBytes = kStagedX == kStreamed ? kSlotScalesAt + kSlotSteps * kStepXScales * 4 : kSlotXAt;
// Blocks of a cluster share the steps of their row blocks and add up in each other's shared memory; 1: runs over all blocks instead.
constexpr int kCluster = W3_CLUSTER;
// A warp has kMine items of 512 bytes to add up over the cluster; item after item goes to block after block.
constexpr int kMine = (kQuads + kSplitWarps - 1) / kSplitWarps;
constexpr int kOwnItems = (kWarps * kMine + kCluster - 1) / kCluster;
constexpr int kSumBytes = (kCluster - 1) * kOwnItems * 512;
// For racecheck, which sees no barrier of a warp that ptxas could leave out: every lane arrives, and not one for all.
#ifndef W3_CHECKED
#define W3_CHECKED 0
#endif
constexpr int kArrivals = W3_CHECKED ? 32 : 1;
constexpr bool kScaledX = kInt8Map || kBf16;
constexpr u32 kEmpty = 0xFFFFFFFFu;                      // a NaN that no arithmetic produces

static_assert(!kWarpgroups || (kRowWarps % 4 == 0 && kTokenTiles <= 4), "the four warps of a warpgroup take four row tiles");
static_assert(!kBeside || (kInt8Map && kAllTokenTiles == 1), "planes beside each other fill one tile");
static_assert(kBulk || kStagedX == kOwn || kStagedX == kFromGlobal, "the other ways need bulk copies");
static_assert(kSplitWarps % kSlotSteps == 0 && kSlots % kSlotGroups == 0, "a slot stays with one group, which sees each of its phases");
static_assert(kBulk || kSlotGroups == 1, "before sm_90 a slot is a step of every worker");
static_assert(kCluster == 1 || kBulk, "clusters come with sm_90");
static_assert(kStagedX <= 0 || kSplitWarps == 1, "the activation ring needs all warps on the same step");

struct alignas(16) Params {
  const u16* x;
  const char* codes;
  const char* scales;
  const void* qmap;
  const u16* bias;     // or null
  u16* y;
  char* partials;      // [blocks, kRowWarps, kTokenWarps, kQuads, 32, 16 bytes], all kEmpty between launches
  const char* staged;  // [steps, kStepXBytes], unless kStagedX is kOwn
  const float* staged_scales;  // [steps, kStepXScales]
  i64 x_stride;
  int tokens, rows, columns;
  int row_tiles, column_tiles, groups;
  u32 group_reciprocal;  // (2^32 - 1) / tiles that share a scale
  int map_tiles;       // row tiles that share a map; 0: one map for all
  int steps;
  u32 step_reciprocal;   // (2^32 - 1) / steps
  int row_blocks, resident_steps;
  int run_units, longer_runs;  // units of a thread block: run_units + 1 for the first longer_runs blocks
  int x_aligned;
  u32 token_reciprocal;  // (2^32 - 1) / tokens
  int first_chunk, chunk_steps;  // kept activations are announced in chunks of steps; the first is longer
  u32 chunk_reciprocal;          // (2^32 - 1) / chunk_steps
  int chunks;
  int clusters;
};


