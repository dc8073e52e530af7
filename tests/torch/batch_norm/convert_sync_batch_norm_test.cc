#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "core/base/log.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/sync_batch_norm.h"
#include "tests/torch/batch_norm/norm_net.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::nn::BatchNormOptions;

// A module of its own with a Sequential in it.
struct WithFeatures : torch::nn::Module {
  WithFeatures()
      : features(torch::nn::Conv2d(1, 2, 3), torch::nn::BatchNorm2d(2), torch::nn::ReLU()) {
    register_module("features", features);
  }
  torch::nn::Sequential features;
};

struct WithMember : torch::nn::Module {
  WithMember() : norm(3) {
    register_module("head", head);
    register_module("norm", norm);
  }
  WithFeatures make;  // not registered: none of its business
  std::shared_ptr<WithFeatures> head = std::make_shared<WithFeatures>();
  torch::nn::BatchNorm1d norm;
};

std::string Refusal(torch::nn::Module& module) {
  const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { convert_sync_batchnorm(module); });
  EXPECT_THAT(text, HasSubstr("convert_sync_batchnorm"));
  return text;
}

TEST(ConvertSyncBatchNormTest, ReplacesElementsOfSequentials) {
  WithFeatures net;
  EXPECT_EQ(convert_sync_batchnorm(net), 1);
  EXPECT_TRUE(net.features[1]->as<SyncBatchNorm>());
  EXPECT_TRUE(net.named_modules("", false)["features.1"]->as<SyncBatchNorm>());
  EXPECT_EQ(convert_sync_batchnorm(net), 0);
  // And it is the one that runs: in training it asks for a session.
  ErrorOf(ErrorCode::NotInitialized, [&] { net.features->forward(torch::ones({2, 1, 4, 4})); });
}

TEST(ConvertSyncBatchNormTest, KeepsTensorsOptionsAndMode) {
  torch::nn::Sequential net(
      torch::nn::BatchNorm1d(BatchNormOptions(2).eps(0.5).momentum(std::nullopt)),
      torch::nn::BatchNorm2d(BatchNormOptions(2).affine(false)),
      torch::nn::BatchNorm3d(BatchNormOptions(2).track_running_stats(false)));
  net->to(torch::kDouble);
  net[1]->eval();
  net->parameters()[0].set_requires_grad(false);
  const auto parameters = net->named_parameters();
  const auto buffers = net->named_buffers();
  EXPECT_EQ(convert_sync_batchnorm(*net), 3);
  ASSERT_EQ(net->named_parameters().keys(), parameters.keys());
  ASSERT_EQ(net->named_buffers().keys(), buffers.keys());
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(item.value().is_same(parameters[item.key()])) << item.key();
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(item.value().is_same(buffers[item.key()])) << item.key();
  }
  const auto& first = net->at<SyncBatchNormImpl>(0);
  EXPECT_EQ(first.options.eps(), 0.5);
  EXPECT_EQ(first.options.momentum(), std::nullopt);
  EXPECT_FALSE(first.weight.requires_grad());
  EXPECT_TRUE(first.bias.requires_grad());
  EXPECT_TRUE(first.is_training());
  EXPECT_FALSE(net->at<SyncBatchNormImpl>(1).is_training());
  EXPECT_FALSE(net->at<SyncBatchNormImpl>(1).weight.defined());
  EXPECT_FALSE(net->at<SyncBatchNormImpl>(2).running_mean.defined());
}

// The same module in two places stays one module.
TEST(ConvertSyncBatchNormTest, ASharedModuleStaysShared) {
  torch::nn::Sequential net;
  torch::nn::ModuleList list;
  {
    torch::nn::BatchNorm1d shared(2);
    net->push_back(shared);
    net->push_back(torch::nn::ReLU());
    net->push_back(shared);
    torch::nn::Sequential other(shared, torch::nn::BatchNorm1d(2));
    list->push_back(net);
    list->push_back(other);
    list->push_back(other);
  }
  EXPECT_EQ(convert_sync_batchnorm(*list), 2);
  EXPECT_TRUE(net[0]->as<SyncBatchNorm>());
  EXPECT_EQ(net[0], net[2]);
  EXPECT_EQ(net[0], list->at<torch::nn::SequentialImpl>(1)[0]);
  EXPECT_NE(net[0], list->at<torch::nn::SequentialImpl>(1)[1]);
}

TEST(ConvertSyncBatchNormTest, AMemberOfATypeIsRefusedAndNothingChanges) {
  WithMember net;
  EXPECT_THAT(Refusal(net), AllOf(HasSubstr("changed nothing: \"norm\" is not an element"),
                                  HasSubstr("declare it as sirtaki::SyncBatchNorm")));
  EXPECT_TRUE(net.head->features[1]->as<torch::nn::BatchNorm2d>());
}

TEST(ConvertSyncBatchNormTest, EveryModuleInTheWayIsNamed) {
  torch::nn::ModuleDict dict;
  torch::nn::ModuleList list(torch::nn::BatchNorm1d(2), std::make_shared<WithMember>());
  dict->update({{"list", list.ptr()}});
  EXPECT_THAT(Refusal(*dict),
              AllOf(HasSubstr("\"list.0\" is not"), HasSubstr("\"list.1.norm\" is")));
}

TEST(ConvertSyncBatchNormTest, AnElementThatSomebodyElseHoldsIsRefused) {
  torch::nn::BatchNorm1d held(2);
  torch::nn::Sequential net(torch::nn::BatchNorm1d(2), held);
  EXPECT_THAT(Refusal(*net),
              AllOf(HasSubstr("\"1\" is held by something besides"), HasSubstr("release it")));
  EXPECT_TRUE(net[0]->as<torch::nn::BatchNorm1d>());
  held = nullptr;
  EXPECT_EQ(convert_sync_batchnorm(*net), 2);
}

struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
  using BatchNorm1dImpl::BatchNorm1dImpl;
  torch::Tensor forward(const torch::Tensor& x) { return BatchNorm1dImpl::forward(x) + 1; }
};

TEST(ConvertSyncBatchNormTest, ADerivedClassIsRefused) {
  torch::nn::Sequential net(std::make_shared<OwnNormImpl>(2));
  EXPECT_THAT(Refusal(*net), HasSubstr("\"0\" is of a class derived from BatchNorm"));
}

TEST(ConvertSyncBatchNormTest, ABatchNormItselfIsRefused) {
  torch::nn::BatchNorm1d norm(2);
  EXPECT_THAT(Refusal(*norm), HasSubstr("was given a BatchNorm itself"));
}

TEST(ConvertSyncBatchNormTest, NothingToConvertIsAWarning) {
  std::string logged;
  core::SetLogSink([&](core::LogLevel level, const std::string& line) {
    EXPECT_EQ(level, core::LogLevel::kWarning);
    logged += line;
  });
  torch::nn::Sequential net(torch::nn::Linear(2, 2));
  EXPECT_EQ(convert_sync_batchnorm(*net), 0);
  EXPECT_THAT(logged, HasSubstr("convert_sync_batchnorm found no BatchNorm"));
  logged.clear();
  torch::nn::Sequential converted(SyncBatchNorm(2));
  EXPECT_EQ(convert_sync_batchnorm(*converted), 0);
  core::SetLogSink(nullptr);
  EXPECT_EQ(logged, "");
}

// Converted after the optimizer was made; two such nets in one session have names of their own.
TEST(ConvertSyncBatchNormTest, AConvertedNetTrainsAsOnTheJoinedBatch) {
  constexpr int kSteps = 6;
  constexpr int kSize = 2;
  const auto expected = TrainNormNetAlone(kSteps, kSize);
  RunTorchRanks(kSize, [&](int rank) {
    std::vector<torch::nn::Sequential> nets;
    std::vector<torch::optim::SGD> bases;
    for (int i = 0; i < 2; ++i) {
      nets.push_back(MakeNormNet(torch::nn::BatchNorm2d(4), torch::nn::BatchNorm2d(3)));
      bases.emplace_back(nets.back()->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      EXPECT_EQ(convert_sync_batchnorm(*nets.back()), 2);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      auto optimizer = DistributedOptimizer(std::move(bases[i]), nets[i]->named_parameters());
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        NormLoss(nets[i], ImagesOfRank(step, rank)).backward();
        optimizer.step();
      }
      auto all = nets[i]->parameters();
      for (const auto& buffer : nets[i]->buffers()) all.push_back(buffer.to(torch::kDouble));
      EXPECT_LT(Distance(all, expected), 1e-11);
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
