// The pieces on the way of a tensor, one at a time, against memcpy of the same bytes.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "core/negotiator.h"
#include "core/wire.h"

namespace sirtaki::benchmarks {
namespace {

void BM_Memcpy(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Memcpy)->Arg(1 << 16)->Arg(1 << 20);

// One rank's share of a step: 161 tensors with ids, reported, encoded, decoded and decided by a
// world of two in one thread.
void BM_NegotiateStep(benchmark::State& state) {
  using namespace sirtaki::core;
  const Tree tree = Tree::Build({0, 0}, 8);
  NegotiatorOptions options;
  options.sets[kWorldSet] = RankRanges::Span(0, 1);
  Negotiator root(options, tree);
  options.rank = 1;
  Negotiator leaf(options, tree);
  Signature signature;
  signature.shape = {64, 64, 3, 3};
  const SignaturePtr shared = std::make_shared<const Signature>(signature);
  const TimePoint now{};
  const auto requests = [&] {
    std::vector<Request> all;
    for (int t = 0; t < 161; ++t) {
      Request request;
      request.key = Key::Named(kWorldSet, "gradient/" + std::to_string(t));
      request.signature = shared;
      all.push_back(std::move(request));
    }
    return all;
  };
  const auto carry = [&](Negotiator& from, int rank, Negotiator& to) {
    for (Outgoing& out : from.TakeOutgoing()) {
      Message message;
      const Status status = Decode(Encode({1, std::move(out.body)}), &message);
      if (!status.ok()) state.SkipWithError("the wire format");
      to.Receive(rank, std::move(message.body), now);
    }
  };
  for (auto _ : state) {
    leaf.Submit(requests(), now);
    root.Submit(requests(), now);
    carry(leaf, 1, root);
    benchmark::DoNotOptimize(root.TakeBatches());
    carry(root, 0, leaf);
    benchmark::DoNotOptimize(leaf.TakeBatches());
  }
  state.SetItemsProcessed(state.iterations() * 161);
}
BENCHMARK(BM_NegotiateStep);

}  // namespace
}  // namespace sirtaki::benchmarks

BENCHMARK_MAIN();
