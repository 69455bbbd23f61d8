// Runs a launch of the prefill kernel on a host: emulated ARENA ADDRESS PARAMS GRID SHARED_BYTES SEED
//
// ARENA is a file with all tensors, in which y is written; ADDRESS is where it lay when PARAMS, the kernel's packed parameters, were made.
// Exit 0: it ran to the end. 2: a rule was broken. 3: it hangs. A line says what.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "w3_prefill.cu"

alignas(1024) char shared[1024];

static Params params;

static void body() {
  w3_prefill(params);
  REQUIRE(my_instructions().empty(), "a matrix instruction was never waited for");
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

static std::unique_ptr<Thread> thread_of(u32 index, int rank) {
  constexpr size_t kStack = 64 << 10;
  auto thread = std::make_unique<Thread>();
  thread->index = index;
  thread->rank = rank;
  thread->stack.reset(new char[kStack]);
  getcontext(&thread->context);
  thread->context.uc_stack.ss_sp = thread->stack.get();
  thread->context.uc_stack.ss_size = kStack;
  makecontext(&thread->context, body, 0);
  return thread;
}

static void run_cluster(u32 first_block, u32 seed) {
  std::vector<std::unique_ptr<Thread>> threads;
  cluster = std::make_unique<Meeting>(kCluster * kThreads);
  for (int rank = 0; rank < kCluster; ++rank) {
    blocks[rank] = std::make_unique<Block>();
    memset(blocks[rank]->shared, 0xFF, kMaxShared);  // NaN, so that what is read too early shows
    blocks[rank]->named[0].size = kThreads;
    for (int i = 0; i < kThreads; ++i) threads.push_back(thread_of(i, rank));
  }
  run(threads, first_block, seed);
}

int main(int count, char** arguments) {
  REQUIRE(count == 7, "expected six arguments");
  struct stat status;
  const int file = open(arguments[1], O_RDWR);
  REQUIRE(file >= 0 && fstat(file, &status) == 0, "no arena");
  void* const mapped = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  REQUIRE(mapped != MAP_FAILED, "the arena cannot be mapped");
  FILE* const packed = fopen(arguments[3], "rb");
  REQUIRE(packed != nullptr && fread(&params, 1, sizeof params, packed) == sizeof params && fgetc(packed) == EOF,
          "expected parameters of %zu bytes", sizeof params);

  const u64 moved = reinterpret_cast<u64>(mapped) - strtoull(arguments[2], nullptr, 10);
  const auto move = [&](auto*& pointer) {
    if (pointer != nullptr) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(reinterpret_cast<u64>(pointer) + moved);
  };
  move(params.codes);
  move(params.scales);
  move(params.qmap);
  move(params.bias);
  move(params.y);
  params.x_map.matrix += moved;

  gridDim.x = atoi(arguments[4]);
  shared_bytes = atoi(arguments[5]);
  REQUIRE(gridDim.x % kCluster == 0 && shared_bytes <= kMaxShared, "a grid or shared memory that cannot be launched");
  for (u32 first = 0; first < gridDim.x; first += kCluster) run_cluster(first, atoi(arguments[6]));
}
