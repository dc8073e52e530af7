// Our kernels on FakeGpus: what a thread does is compiled for the host, and done thread by thread.
#include <cstring>

#include "ops/cuda/kernel_bodies.h"
#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using namespace ops::cuda;  // NOLINT: the lists of kernels name its types

using Lock = std::lock_guard<std::mutex>;

struct FakeKernel {
  std::size_t table_bytes;
  void (*run)(const void* table, unsigned blocks);
  FakeRanges (*uses)(const void* table);
};

template <typename From, typename To>
FakeRanges UsedByCopy(const void* table) {
  const auto& copy = *static_cast<const CopyTable*>(table);
  FakeRanges uses;
  for (int i = 0; i < copy.count; ++i) {
    const CopySegment& segment = copy.segments[i];
    const auto count = static_cast<std::size_t>(segment.count);
    uses.push_back({segment.from, segment.from != nullptr ? count * sizeof(From) : 0});
    uses.push_back({segment.to, count * sizeof(To)});
  }
  return uses;
}

template <typename T>
FakeRanges UsedByReduce(const void* table) {
  const auto& reduce = *static_cast<const ReduceTable*>(table);
  const std::size_t bytes = static_cast<std::size_t>(reduce.count) * sizeof(T);
  return {{reduce.parts, static_cast<std::size_t>(reduce.members) * bytes}, {reduce.result, bytes}};
}

template <typename From, typename To, bool kScales>
void RunCopy(const void* table, unsigned blocks) {
  const auto& copy = *static_cast<const CopyTable*>(table);
  for (unsigned block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreadsOfABlock; ++thread) {
      CopyTile<From, To, kScales>(copy, block, thread);
    }
  }
}

template <typename Op, typename T>
void RunReduce(const void* table, unsigned blocks) {
  const long long threads = static_cast<long long>(blocks) * kThreadsOfABlock;
  for (long long thread = 0; thread < threads; ++thread) {
    ReduceElements<Op, T>(*static_cast<const ReduceTable*>(table), thread, threads);
  }
}

const std::map<std::string, FakeKernel>& FakeKernels() {
#define SIRTAKI_COPY(name, type) \
  {"sirtaki_" #name, {sizeof(CopyTable), RunCopy<type, type, false>, UsedByCopy<type, type>}},
#define SIRTAKI_CONVERT(name, from, to) \
  {"sirtaki_" #name, {sizeof(CopyTable), RunCopy<from, to, true>, UsedByCopy<from, to>}},
#define SIRTAKI_REDUCE(name, op, type) \
  {"sirtaki_" #name, {sizeof(ReduceTable), RunReduce<op, type>, UsedByReduce<type>}},
  static const std::map<std::string, FakeKernel> kernels = {
      SIRTAKI_COPY_KERNELS(SIRTAKI_COPY) SIRTAKI_CONVERT_KERNELS(SIRTAKI_CONVERT)
          SIRTAKI_REDUCE_KERNELS(SIRTAKI_REDUCE)};
  return kernels;
}

Error GetFunction(FunctionHandle* function, ModuleHandle, const char* name) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const auto found = FakeKernels().find(name);
  if (found == FakeKernels().end()) return static_cast<Error>(500);
  *function = reinterpret_cast<FunctionHandle>(const_cast<FakeKernel*>(&found->second));
  return Error::kSuccess;
}

Error Launch(FunctionHandle function, unsigned blocks, unsigned, unsigned, unsigned threads,
             unsigned, unsigned, unsigned, StreamHandle stream, void** parameters, void**) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  std::string name;
  const FakeKernel* kernel = nullptr;
  for (const auto& [known, of] : FakeKernels()) {
    if (reinterpret_cast<FunctionHandle>(const_cast<FakeKernel*>(&of)) != function) continue;
    name = known;
    kernel = &of;
  }
  s.Log("cuLaunchKernel " + name);
  int error = 0;
  if (s.Fails("cuLaunchKernel", &error)) return static_cast<Error>(error);
  if (kernel == nullptr || threads != kThreadsOfABlock || blocks == 0) {
    return static_cast<Error>(1);
  }
  // By value, as a launch takes its parameters.
  const auto* table = static_cast<const std::byte*>(parameters[0]);
  const auto run = [kernel, blocks,
                    copy = std::vector<std::byte>(table, table + kernel->table_bytes)] {
    kernel->run(copy.data(), blocks);
    return true;
  };
  s.Put(s.StreamOf(stream), "cuLaunchKernel", {run, kernel->uses(table)});
  return Error::kSuccess;
}

}  // namespace

void FillFakeKernels(ops::cuda::Api* api) {
  api->ModuleLoadData = [](ModuleHandle* module, const void* image) {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    s.Log("cuModuleLoadData");
    int error = 0;
    if (s.Fails("cuModuleLoadData", &error)) return static_cast<Error>(error);
    *module = reinterpret_cast<ModuleHandle>(const_cast<void*>(image));
    return Error::kSuccess;
  };
  api->ModuleUnload = [](ModuleHandle) {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    s.Log("cuModuleUnload");
    return Error::kSuccess;
  };
  api->ModuleGetFunction = GetFunction;
  api->LaunchKernel = Launch;
}

}  // namespace sirtaki::tests
