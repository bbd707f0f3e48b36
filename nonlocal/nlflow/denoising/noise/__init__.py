"""Noise: models of it, which one a picture has, how strong it is, and how much of it an estimate has left."""

from nlflow.denoising.noise.base import Noise, NoiseEstimate
from nlflow.denoising.noise.drift import Drift
from nlflow.denoising.noise.estimation import estimate_sigma, estimate_sigmas
from nlflow.denoising.noise.files import load_noise, noise_of
from nlflow.denoising.noise.gaussian import GaussianNoise
from nlflow.denoising.noise.hot import HotPixels, find_hot_pixels
from nlflow.denoising.noise.hum import Hum
from nlflow.denoising.noise.impulses import Impulses, find_impulses
from nlflow.denoising.noise.lines import find_hum
from nlflow.denoising.noise.magnitudes import NoncentralChi, Rician, find_rician
from nlflow.denoising.noise.mixture import Mixture
from nlflow.denoising.noise.photon import PhotonTransfer, photon_transfer
from nlflow.denoising.noise.recordings import spectrum_of_signal
from nlflow.denoising.noise.risk import discrepancy, perturbation, sure
from nlflow.denoising.noise.speckle import Speckle, find_speckle
from nlflow.denoising.noise.stabilizing import Poisson
from nlflow.denoising.noise.stripes import Stripes, find_stripes
from nlflow.denoising.noise.verdict import estimate_noise

__all__ = [
    "Drift",
    "GaussianNoise",
    "HotPixels",
    "Hum",
    "Impulses",
    "Mixture",
    "Noise",
    "NoiseEstimate",
    "NoncentralChi",
    "PhotonTransfer",
    "Poisson",
    "Rician",
    "Speckle",
    "Stripes",
    "discrepancy",
    "estimate_noise",
    "estimate_sigma",
    "estimate_sigmas",
    "find_hot_pixels",
    "find_hum",
    "find_impulses",
    "find_rician",
    "find_speckle",
    "find_stripes",
    "load_noise",
    "noise_of",
    "perturbation",
    "photon_transfer",
    "spectrum_of_signal",
    "sure",
]
