"""BibTeX entries of the papers behind our selectors, and of this package.

Each selector names its entries in :attr:`~fedsel_flwr.selectors.Selector.citations`; ``fedsel cite`` prints them. Each
field was checked against a public record of the paper: the publisher's, arXiv's, OpenReview's or a library's. A field
that could not be checked is left out. ``tests/selectors/test_citations.py`` compares the entries with the selectors'
docstrings, and the entry of this package with ``CITATION.cff``.
"""

from __future__ import annotations

MCMAHAN = r"""@inproceedings{mcmahan2017communication,
  author        = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
                   Ag{\"u}era y Arcas, Blaise},
  title         = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  booktitle     = {Proceedings of the 20th International Conference on Artificial Intelligence and Statistics},
  series        = {Proceedings of Machine Learning Research},
  volume        = {54},
  pages         = {1273--1282},
  publisher     = {PMLR},
  year          = {2017},
  url           = {https://proceedings.mlr.press/v54/mcmahan17a.html},
  eprint        = {1602.05629},
  archiveprefix = {arXiv},
}"""

LI = """@inproceedings{li2020federated,
  author        = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
                   Smith, Virginia},
  title         = {Federated Optimization in Heterogeneous Networks},
  booktitle     = {Proceedings of Machine Learning and Systems},
  volume        = {2},
  pages         = {429--450},
  year          = {2020},
  eprint        = {1812.06127},
  archiveprefix = {arXiv},
}"""

XIA = """@article{xia2020multi,
  author  = {Xia, Wenchao and Quek, Tony Q. S. and Guo, Kun and Wen, Wanli and Yang, Howard H. and Zhu, Hongbo},
  title   = {Multi-Armed Bandit-Based Client Scheduling for Federated Learning},
  journal = {IEEE Transactions on Wireless Communications},
  volume  = {19},
  number  = {11},
  pages   = {7108--7123},
  year    = {2020},
  doi     = {10.1109/TWC.2020.3008091},
}"""

BEN_AMI = """@article{benami2025client,
  author        = {Ben Ami, Dan and Cohen, Kobi and Zhao, Qing},
  title         = {Client Selection for Generalization in Accelerated Federated Learning: {A} Multi-Armed Bandit
                   Approach},
  journal       = {IEEE Access},
  volume        = {13},
  year          = {2025},
  url           = {https://ieeexplore.ieee.org/document/10891761},
  eprint        = {2303.10373},
  archiveprefix = {arXiv},
}"""

KIM = """@misc{kim2020accurate,
  author        = {Kim, Taehyeon and Bae, Sangmin and Lee, Jin-woo and Yun, Seyoung},
  title         = {Accurate and Fast Federated Learning via Combinatorial Multi-Armed Bandits},
  year          = {2020},
  eprint        = {2012.03270},
  archiveprefix = {arXiv},
  doi           = {10.48550/arXiv.2012.03270},
}"""

ANONYMOUS_PCZFL = """@misc{pczfl2025optimizing,
  author       = {{Anonymous}},
  title        = {Optimizing Federated Learning Client Selection via Multi-Objective Contextual Bandits},
  howpublished = {OpenReview},
  year         = {2025},
  url          = {https://openreview.net/forum?id=DYmzaHwrT9},
}"""

NA = """@misc{na2024gpfl,
  author        = {Na, Shijie and Liang, Yuzhi and Yiu, Siu-Ming},
  title         = {{GPFL}: A Gradient Projection-Based Client Selection Framework for Efficient Federated Learning},
  year          = {2024},
  eprint        = {2403.17833},
  archiveprefix = {arXiv},
  doi           = {10.48550/arXiv.2403.17833},
}"""

CHO = """@inproceedings{cho2022towards,
  author    = {Cho, Yae Jee and Wang, Jianyu and Joshi, Gauri},
  title     = {Towards Understanding Biased Client Selection in Federated Learning},
  booktitle = {Proceedings of the 25th International Conference on Artificial Intelligence and Statistics},
  series    = {Proceedings of Machine Learning Research},
  volume    = {151},
  pages     = {10351--10375},
  publisher = {PMLR},
  year      = {2022},
  url       = {https://proceedings.mlr.press/v151/jee-cho22a.html},
}"""

GOETZ = """@misc{goetz2019active,
  author        = {Goetz, Jack and Malik, Kshitiz and Bui, Duc and Moon, Seungwhan and Liu, Honglei and Kumar, Anuj},
  title         = {Active Federated Learning},
  year          = {2019},
  eprint        = {1909.12641},
  archiveprefix = {arXiv},
  doi           = {10.48550/arXiv.1909.12641},
}"""

LAI = """@inproceedings{lai2021oort,
  author        = {Lai, Fan and Zhu, Xiangfeng and Madhyastha, Harsha V. and Chowdhury, Mosharaf},
  title         = {{Oort}: Efficient Federated Learning via Guided Participant Selection},
  booktitle     = {15th USENIX Symposium on Operating Systems Design and Implementation (OSDI 21)},
  pages         = {19--35},
  publisher     = {USENIX Association},
  year          = {2021},
  url           = {https://www.usenix.org/conference/osdi21/presentation/lai},
  eprint        = {2010.06081},
  archiveprefix = {arXiv},
}"""

NISHIO = """@inproceedings{nishio2019client,
  author        = {Nishio, Takayuki and Yonetani, Ryo},
  title         = {Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge},
  booktitle     = {2019 IEEE International Conference on Communications (ICC)},
  pages         = {1--7},
  year          = {2019},
  doi           = {10.1109/ICC.2019.8761315},
  eprint        = {1804.08333},
  archiveprefix = {arXiv},
}"""

CHAI = """@inproceedings{chai2020tifl,
  author        = {Chai, Zheng and Ali, Ahsan and Zawad, Syed and Truex, Stacey and Anwar, Ali and
                   Baracaldo, Nathalie and Zhou, Yi and Ludwig, Heiko and Yan, Feng and Cheng, Yue},
  title         = {{TiFL}: A Tier-based Federated Learning System},
  booktitle     = {Proceedings of the 29th International Symposium on High-Performance Parallel and Distributed
                   Computing},
  pages         = {125--136},
  publisher     = {Association for Computing Machinery},
  year          = {2020},
  doi           = {10.1145/3369583.3392686},
  eprint        = {2001.09249},
  archiveprefix = {arXiv},
}"""

TANG = """@inproceedings{tang2022fedcor,
  author        = {Tang, Minxue and Ning, Xuefei and Wang, Yitu and Sun, Jingwei and Wang, Yu and Li, Hai and
                   Chen, Yiran},
  title         = {{FedCor}: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning},
  booktitle     = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages         = {10102--10111},
  year          = {2022},
  doi           = {10.1109/CVPR52688.2022.00986},
  eprint        = {2103.13822},
  archiveprefix = {arXiv},
}"""

BALAKRISHNAN = """@inproceedings{balakrishnan2022diverse,
  author    = {Balakrishnan, Ravikumar and Li, Tian and Zhou, Tianyi and Himayat, Nageen and Smith, Virginia and
               Bilmes, Jeff},
  title     = {Diverse Client Selection for Federated Learning via Submodular Maximization},
  booktitle = {International Conference on Learning Representations},
  year      = {2022},
  url       = {https://openreview.net/forum?id=nwKXyFvaUm},
}"""

PAN = """@article{pan2024contextual,
  author  = {Pan, Q. and Cao, H. and Zhu, Y. and Liu, J. and Li, B.},
  title   = {Contextual Client Selection for Efficient Federated Learning over Edge Devices},
  journal = {IEEE Transactions on Mobile Computing},
  volume  = {23},
  number  = {6},
  pages   = {6538--6548},
  year    = {2024},
  doi     = {10.1109/TMC.2023.3323645},
}"""


def package_entry() -> str:
    """Return the entry of this package.

    >>> print(package_entry().splitlines()[1])
      author  = {{The fedsel-flwr authors}},
    """
    from fedsel_flwr import __version__

    return f"""@software{{fedsel_flwr,
  author  = {{{{The fedsel-flwr authors}}}},
  title   = {{fedsel-flwr: client selection for federated learning as {{Flower}} strategies}},
  version = {{{__version__}}},
}}"""
