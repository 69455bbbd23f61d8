// CUDA threads as coroutines of one host thread: each runs until it has to wait, then the next one that need not wait goes on.
//
// So a run is the same each time, whatever else the machine does; and where nobody can go on, that is seen at once and is the end (exit 3).
// A broken rule ends it too (exit 2). Orders differ by a seed: 0 takes threads by number, another one shuffles them for every round.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

[[noreturn]] inline void end(int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  printf("\n");
  fflush(stdout);
  exit(status);
}

#define REQUIRE(condition, ...) ((condition) ? void() : end(2, __VA_ARGS__))

// Where `size` threads wait for each other, at the same kind of instruction.
struct Meeting {
  u32 size, come = 0, round = 0;
  const char* kind = nullptr;
  explicit Meeting(u32 size) : size(size) {}
};

// A transaction barrier in shared memory: a phase ends when all have arrived and all announced bytes have come.
struct Barrier {
  u32 arrivals = 0, missing = 0, phase = 0;
  i64 bytes = 0;  // announced and not here yet; below zero while bytes come before they are announced
};

constexpr int kMaxShared = 1 << 18, kMaxWarps = 16, kMaxCluster = 2;

struct Block {
  alignas(1024) char shared[kMaxShared];
  std::vector<Barrier> barriers = std::vector<Barrier>(kMaxShared / 8);
  std::vector<Meeting> warps = std::vector<Meeting>(kMaxWarps, Meeting(32));
  std::vector<Meeting> named = std::vector<Meeting>(16, Meeting(0));  // [0]: the whole block
  u32 slots[kMaxWarps][2][32][8];                                      // what lanes show each other; two in turn need one meeting each
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  u32 index;  // in its block
  int rank;   // of the block in its cluster
  bool done = false;
  const u32* word = nullptr;  // it waits while (*word & mask) == value
  u32 mask, value;
  bool ready() const { return !done && (word == nullptr || (*word & mask) != value); }
};

struct Index {
  u32 x;
};

inline Index threadIdx, blockIdx, gridDim;
inline Thread* self;
inline ucontext_t scheduler;
inline std::unique_ptr<Block> blocks[kMaxCluster];
inline std::unique_ptr<Meeting> cluster;
inline u32 shared_bytes;

inline Block& my_block() { return *blocks[self->rank]; }

inline void wait_while(const u32& word, u32 mask, u32 value) {
  if ((word & mask) != value) return;
  self->word = &word;
  self->mask = mask;
  self->value = value;
  swapcontext(&self->context, &scheduler);
  self->word = nullptr;
}

inline void meet(Meeting& meeting, const char* kind) {
  REQUIRE(meeting.come == 0 || meeting.kind == kind, "%s beside %s: threads that should do the same do not", kind, meeting.kind);
  meeting.kind = kind;
  const u32 round = meeting.round;
  if (++meeting.come == meeting.size) {
    meeting.come = 0;
    ++meeting.round;
  }
  wait_while(meeting.round, ~0u, round);
}

// Runs the threads of a cluster to their ends.
inline void run(std::vector<std::unique_ptr<Thread>>& threads, u32 first_block, u32 seed) {
  std::mt19937 generator(seed);
  std::vector<Thread*> order;
  for (auto& thread : threads) order.push_back(thread.get());
  for (size_t left = order.size(); left > 0;) {
    if (seed != 0) std::shuffle(order.begin(), order.end(), generator);
    bool moved = false;
    for (Thread* thread : order) {
      if (!thread->ready()) continue;
      moved = true;
      self = thread;
      threadIdx.x = thread->index;
      blockIdx.x = first_block + thread->rank;
      swapcontext(&scheduler, &thread->context);
      left -= thread->done;
    }
    if (!moved) end(3, "hang: each of %zu threads waits for another", left);
  }
}
