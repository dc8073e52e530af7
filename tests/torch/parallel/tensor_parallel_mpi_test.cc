// RANKS: 1 2 3 4
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace sirtaki::tests {
namespace {

class TensorParallelTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }

  // A seed that all ranks have.
  static std::uint32_t Seed() {
    const auto seed = broadcast(torch::tensor({static_cast<std::int64_t>(std::random_device{}())}),
                                /*root_rank=*/0);
    return static_cast<std::uint32_t>(seed.item<std::int64_t>());
  }

  static double Far(const torch::Tensor& a, const torch::Tensor& b) {
    EXPECT_EQ(a.sizes(), b.sizes());
    return a.sizes() == b.sizes() && a.numel() > 0 ? (a - b).abs().max().item<double>() : 0;
  }

  // What the gradient of the parameter has to be, given that of the whole.
  static void ExpectPart(const torch::Tensor& parameter, const torch::Tensor& whole_gradient) {
    const torch::Tensor expected =
        is_split(parameter) ? detail::PartFor(parameter, whole_gradient) : whole_gradient;
    EXPECT_LT(Far(parameter.grad(), expected), 1e-10);
  }
};

TEST_F(TensorParallelTest, WhatIsWholeIsAlikeWithGeneratorsThatDiffer) {
  torch::manual_seed(5);
  const torch::nn::Linear first(6, 4);  // as the first rank draws it
  torch::manual_seed(5 + rank());
  const RowParallelLinear row(RowParallelLinearOptions(6, 4));
  EXPECT_TRUE(row->bias.equal(first->bias));
  EXPECT_TRUE(row->bias.requires_grad() && row->bias.is_leaf());
}

TEST_F(TensorParallelTest, LayersStartAsTheUnsplitOnesToTheBit) {
  torch::manual_seed(11);
  const torch::nn::Linear first(7, 24);
  const torch::nn::Linear second(torch::nn::LinearOptions(11, 5).bias(false));
  const torch::nn::Embedding letters(torch::nn::EmbeddingOptions(19, 6).padding_idx(17));
  const torch::Tensor after = torch::rand({3});
  torch::manual_seed(11);
  const ColumnParallelLinear column(ColumnParallelLinearOptions(7, 24).blocks(3).unit(2));
  const RowParallelLinear row(RowParallelLinearOptions(11, 5).bias(false));
  const ParallelEmbedding embedding(ParallelEmbeddingOptions(19, 6).padding_idx(17));
  EXPECT_TRUE(torch::rand({3}).equal(after));  // all generators have gone as far
  EXPECT_TRUE(whole_of(column->weight).equal(first->weight));
  EXPECT_TRUE(whole_of(column->bias).equal(first->bias));
  EXPECT_TRUE(whole_of(row->weight).equal(second->weight));
  EXPECT_TRUE(whole_of(embedding->weight).equal(letters->weight));
  if (size() > 1) {
    EXPECT_LT(column->weight.numel(), first->weight.numel());
  }

  torch::manual_seed(12);
  first->weight.detach().normal_(0, 3);
  torch::manual_seed(12);
  fill_whole(column->weight, [](torch::Tensor whole) { whole.normal_(0, 3); });
  EXPECT_TRUE(whole_of(column->weight).equal(first->weight));
}

TEST_F(TensorParallelTest, LinearLayersComputeWhatTheUnsplitOnesDo) {
  const std::uint32_t seed = Seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&random](int most) {
    return std::uniform_int_distribution<int>(1, most)(random);
  };
  for (int round = 0; round < 20; ++round) {
    const std::int64_t in = up_to(9);
    const int blocks = up_to(3);
    const int unit = up_to(3);
    const std::int64_t hidden = std::int64_t{blocks} * unit * (size() + up_to(5) - 1);
    const std::int64_t out = up_to(7);
    const bool bias = up_to(2) == 1;
    const bool gather = up_to(2) == 1;
    const std::vector<std::int64_t> batch = up_to(2) == 1
                                                ? std::vector<std::int64_t>{up_to(5)}
                                                : std::vector<std::int64_t>{up_to(3), up_to(4)};
    torch::manual_seed(seed + static_cast<std::uint32_t>(round));
    torch::nn::Linear expand(torch::nn::LinearOptions(in, hidden).bias(bias));
    torch::nn::Linear contract(torch::nn::LinearOptions(hidden, out).bias(bias));
    torch::manual_seed(seed + static_cast<std::uint32_t>(round));
    ColumnParallelLinear column(ColumnParallelLinearOptions(in, hidden)
                                    .bias(bias)
                                    .blocks(gather ? blocks : 1)
                                    .unit(unit)
                                    .gather_output(gather));
    RowParallelLinear row(
        RowParallelLinearOptions(hidden, out).bias(bias).unit(unit).input_is_parallel(!gather));
    for (torch::nn::Module* module :
         std::vector<torch::nn::Module*>{expand.get(), contract.get(), column.get(), row.get()}) {
      module->to(torch::kDouble);
    }
    std::vector<std::int64_t> shape = batch;
    shape.push_back(in);
    const torch::Tensor x = torch::randn(shape, torch::kDouble);
    const torch::Tensor of_whole = x.clone().requires_grad_();
    const torch::Tensor of_parts = x.clone().requires_grad_();
    const torch::Tensor expected = contract(torch::tanh(expand(of_whole)));
    const torch::Tensor found = row(torch::tanh(column(of_parts)));
    EXPECT_LT(Far(found, expected), 1e-12);
    expected.sin().sum().backward();
    found.sin().sum().backward();
    EXPECT_LT(Far(of_parts.grad(), of_whole.grad()), 1e-10);
    ExpectPart(column->weight, expand->weight.grad());
    ExpectPart(row->weight, contract->weight.grad());
    if (bias) {
      ExpectPart(column->bias, expand->bias.grad());
      ExpectPart(row->bias, contract->bias.grad());
    }
    if (testing::Test::HasFailure()) break;
  }
}

TEST_F(TensorParallelTest, EmbeddingAndLossComputeWhatTheUnsplitOnesDo) {
  const std::uint32_t seed = Seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto up_to = [&random](int most) {
    return std::uniform_int_distribution<int>(1, most)(random);
  };
  using Reduction = ParallelCrossEntropyOptions::Reduction;
  for (int round = 0; round < 20; ++round) {
    const std::int64_t words = size() + up_to(12) - 1;
    const std::int64_t width = up_to(6);
    const double smoothing = up_to(2) == 1 ? 0.1 : 0.0;
    const std::int64_t padding = up_to(static_cast<int>(words)) - 1;
    torch::manual_seed(seed + static_cast<std::uint32_t>(round));
    torch::nn::Embedding whole(torch::nn::EmbeddingOptions(words, width).padding_idx(padding));
    torch::manual_seed(seed + static_cast<std::uint32_t>(round));
    ParallelEmbedding parts(ParallelEmbeddingOptions(words, width).padding_idx(padding));
    whole->to(torch::kDouble);
    parts->to(torch::kDouble);
    const torch::Tensor ids = torch::randint(words, {3, 4});
    torch::Tensor targets = torch::randint(words, {3, 4});
    targets.masked_fill_(torch::rand({3, 4}) < 0.2, -100);
    // Logits far from zero, where exponentials of theirs would be infinite.
    const double scale = up_to(2) == 1 ? 1 : 1e4;
    for (const Reduction& reduction :
         {Reduction(torch::kMean), Reduction(torch::kSum), Reduction(torch::kNone)}) {
      whole->zero_grad();
      parts->zero_grad();
      ParallelCrossEntropy loss(
          ParallelCrossEntropyOptions(words).reduction(reduction).label_smoothing(smoothing));
      const torch::Tensor seen = whole(ids);
      EXPECT_TRUE(parts(ids).equal(seen));  // adding zeros changes no bit
      const torch::Tensor expected = torch::nn::functional::cross_entropy(
          torch::linear(torch::tanh(seen) * scale, whole->weight).flatten(0, 1), targets.flatten(),
          torch::nn::functional::CrossEntropyFuncOptions()
              .reduction(
                  std::holds_alternative<torch::enumtype::kNone>(reduction)
                      ? torch::nn::functional::CrossEntropyFuncOptions::reduction_t(torch::kNone)
                  : std::holds_alternative<torch::enumtype::kSum>(reduction)
                      ? torch::nn::functional::CrossEntropyFuncOptions::reduction_t(torch::kSum)
                      : torch::nn::functional::CrossEntropyFuncOptions::reduction_t(torch::kMean))
              .label_smoothing(smoothing));
      const torch::Tensor found = loss(parts->logits(torch::tanh(parts(ids)) * scale), targets);
      const bool nothing_counts = (targets != -100).sum().item<std::int64_t>() == 0;
      if (nothing_counts) continue;
      EXPECT_LT(Far(found.flatten(), expected.flatten()), 1e-10 * scale);
      expected.cos().sum().backward();
      found.cos().sum().backward();
      const double far =
          Far(parts->weight.grad(), detail::PartFor(parts->weight, whole->weight.grad()));
      EXPECT_LT(far, 1e-9 * scale);
    }
    if (testing::Test::HasFailure()) break;
  }
}

TEST_F(TensorParallelTest, InfiniteLogitsAreMaskedClasses) {
  ParallelCrossEntropy loss(ParallelCrossEntropyOptions(4 * size()));
  torch::Tensor logits = torch::full({2, 4}, -INFINITY);
  if (rank() == 0) logits.select(1, 1).fill_(3);
  logits.requires_grad_();
  const torch::Tensor found = loss(logits, torch::tensor({1, 1}));
  EXPECT_EQ(found.item<float>(), 0);
  found.backward();
  EXPECT_EQ(logits.grad().abs().sum().item<float>(), 0);
}

TEST_F(TensorParallelTest, AMeshTrainsAsOneProcessOnTheJoinedBatch) {
  const int tensor = size() == 3 ? 3 : std::min(size(), 2);
  const Mesh grid = mesh({{"data", -1}, {"tensor", tensor}});
  const ProcessSet across = grid.set("tensor");
  torch::manual_seed(5);
  torch::nn::Sequential whole(torch::nn::Linear(6, 10), torch::nn::Tanh(), torch::nn::Linear(10, 4),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  torch::manual_seed(5);
  torch::nn::Sequential split(
      ColumnParallelLinear(ColumnParallelLinearOptions(6, 10).process_set(across)),
      torch::nn::Tanh(), RowParallelLinear(RowParallelLinearOptions(10, 4).process_set(across)),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  whole->to(torch::kDouble);
  split->to(torch::kDouble);
  torch::optim::SGD alone(whole->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  const ProcessSet data = grid.set("data");
  broadcast_parameters(*split, data.ranks().front(), data);
  auto optimizer = DistributedOptimizer(
      torch::optim::SGD(split->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9)),
      split->named_parameters(), DistributedOptimizerOptions().process_set(data));
  const std::int64_t rows = 3;
  for (int step = 0; step < 5; ++step) {
    const torch::Tensor x = torch::randn({rows * grid.size("data"), 6}, torch::kDouble);
    const torch::Tensor y = torch::randn({rows * grid.size("data"), 4}, torch::kDouble);
    const auto share = [&](const torch::Tensor& all) {
      return all.narrow(0, rows * grid.coordinate("data"), rows);
    };
    alone.zero_grad();
    torch::mse_loss(whole->forward(x), y).backward();
    const double expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.1);
    alone.step();
    optimizer.zero_grad();
    torch::mse_loss(split->forward(share(x)), share(y)).backward();
    EXPECT_NEAR(clip_grad_norm_(optimizer, 0.1), expected, 1e-9);
    optimizer.step();
  }
  const auto state = whole_state(*split);
  for (const auto& item : whole->named_parameters()) {
    EXPECT_LT(Far(state[item.key()], item.value().detach()), 1e-9) << item.key();
  }
  EXPECT_TRUE(whole_state(*split, at::kMeta)["0.weight"].is_meta());
  check_parameters(*split, data);

  // The unsplit module's state goes into a module that is split, and the other way round.
  torch::nn::Sequential other(
      ColumnParallelLinear(ColumnParallelLinearOptions(6, 10).process_set(across)),
      torch::nn::Tanh(), RowParallelLinear(RowParallelLinearOptions(10, 4).process_set(across)),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  other->to(torch::kDouble);
  load_whole_state(*other, state);
  load_whole_state(*whole, state);
  const torch::Tensor x = torch::randn({2, 6}, torch::kDouble);
  EXPECT_TRUE(other->forward(x).equal(split->forward(x)));
  EXPECT_LT(Far(other->forward(x), whole->forward(x)), 1e-12);
}

TEST_F(TensorParallelTest, ACloneIsALayerOfItsOwn) {
  ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 2 * size() + 1));
  auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(layer->clone());
  EXPECT_TRUE(is_split(copy->weight));
  EXPECT_TRUE(whole_of(copy->weight).equal(whole_of(layer->weight)));
  copy->weight.detach().zero_();
  EXPECT_FALSE(copy->weight.equal(layer->weight));
  EXPECT_TRUE(copy->forward(torch::ones({1, 3})).equal(copy->bias.unsqueeze(0)));
}

TEST_F(TensorParallelTest, AnInfiniteGradientOfOnePartSkipsTheStepOfAll) {
  ColumnParallelLinear layer(ColumnParallelLinearOptions(3, 2 * size()));
  torch::optim::SGD sgd(layer->parameters(), torch::optim::SGDOptions(0.1));
  GradScaler scaler(
      GradScalerOptions().process_set(mesh({{"data", 1}, {"tensor", -1}}).set("data")));
  scaler.scale(layer->forward(torch::ones({2, 3})).sum()).backward();
  if (rank() == 0) layer->weight.mutable_grad().fill_(INFINITY);
  EXPECT_FALSE(scaler.step(sgd));
  scaler.update();
}

}  // namespace
}  // namespace sirtaki::tests
