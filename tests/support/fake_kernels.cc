// Our kernels on FakeGpus: what a thread does is compiled for the host, and done thread by thread.
#include <cstring>

#include "ops/cuda/kernel_bodies.h"
#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {

struct FakeKernel {
  std::size_t table_bytes;
  void (*run)(const void* table, unsigned blocks);
  FakeRanges (*uses)(const void* table);
};

// A kernel on a device that has loaded it.
struct FakeFunction {
  std::string name;
  const FakeKernel* kernel = nullptr;
  int device = 0;
};

struct FakeModule {
  int device = 0;
  std::map<std::string, FakeFunction> functions;
};

namespace {

using namespace ops::cuda;  // NOLINT: the lists of kernels name its types

using Lock = std::lock_guard<std::mutex>;

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

Error Load(ModuleHandle* module, const void*) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  s.Log("cuModuleLoadData");
  int error = 0;
  if (s.Fails("cuModuleLoadData", &error)) return static_cast<Error>(error);
  if (FakeCurrentDevice() < 0) return kFakeInvalidContext;
  auto made = std::make_shared<FakeModule>();
  made->device = FakeCurrentDevice();
  *module = reinterpret_cast<ModuleHandle>(made.get());
  s.modules[*module] = std::move(made);
  return Error::kSuccess;
}

Error Unload(ModuleHandle module) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  s.Log("cuModuleUnload");
  return s.modules.erase(module) == 1 ? Error::kSuccess : kFakeInvalidHandle;
}

Error GetFunction(FunctionHandle* function, ModuleHandle module, const char* name) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  int error = 0;
  if (s.Fails("cuModuleGetFunction", &error)) return static_cast<Error>(error);
  const auto of = s.modules.find(module);
  if (of == s.modules.end()) return kFakeInvalidHandle;
  const auto found = FakeKernels().find(name);
  if (found == FakeKernels().end()) return static_cast<Error>(500);
  FakeFunction& made = of->second->functions[name];
  made = {name, &found->second, of->second->device};
  *function = reinterpret_cast<FunctionHandle>(&made);
  return Error::kSuccess;
}

// Null: its module was unloaded, or it never was one.
const FakeFunction* Find(const FakeGpus::State& s, FunctionHandle handle) {
  for (const auto& [module, of] : s.modules) {
    for (const auto& [name, function] : of->functions) {
      if (reinterpret_cast<const void*>(&function) == handle) return &function;
    }
  }
  return nullptr;
}

Error Launch(FunctionHandle handle, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
             unsigned, unsigned, StreamHandle stream, void** parameters, void**) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const FakeFunction* const function = Find(s, handle);
  s.Log("cuLaunchKernel " + (function != nullptr ? function->name : "of no module"));
  int error = 0;
  if (s.Fails("cuLaunchKernel", &error)) return static_cast<Error>(error);
  if (FakeCurrentDevice() < 0) return kFakeInvalidContext;
  // The stream, the module and the thread are of one context.
  if (function == nullptr || function->device != FakeCurrentDevice() ||
      !s.StreamOf(stream).IsOf(function->device)) {
    return kFakeInvalidHandle;
  }
  if (threads != kThreadsOfABlock || blocks == 0) return static_cast<Error>(1);
  const FakeKernel* const kernel = function->kernel;
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
  api->ModuleLoadData = Load;
  api->ModuleUnload = Unload;
  api->ModuleGetFunction = GetFunction;
  api->LaunchKernel = Launch;
}

}  // namespace sirtaki::tests
